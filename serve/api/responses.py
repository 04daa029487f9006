"""POST /v1/responses: a chat in the format of OpenAI's newer API. Nothing is kept between requests."""

import json
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi.responses import StreamingResponse

from medusa.engine.output import FinishReason
from medusa.serve.api.chat import asked, top_of
from medusa.serve.api.errors import ApiError, as_api_error
from medusa.serve.api.items import ResponsesRequest
from medusa.serve.api.logprobs import Logprobs
from medusa.serve.api.output_items import OutputItems, Told
from medusa.serve.api.reply import event_stream, spec_metrics, wants_metrics
from medusa.serve.api.service import Service
from medusa.serve.api.tools import calls_of
from medusa.serve.reading.events import Reader
from medusa.serve.request import Delta, Ticket

logger = logging.getLogger(__name__)

WORDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of a chat with their names in this API."""


async def respond(service: Service, body: ResponsesRequest, client: str) -> "ResponseReply":
    """Render, check and submit a request.

    Raises:
        ApiError: The request cannot be served.
    """
    chat = body.chat()
    try:
        calls = calls_of(chat)
        (request,), ending = await asked(service, chat, calls, client)
    except ApiError as error:
        raise _in_its_words(error) from error
    (ticket,) = await service.start([request])
    reader = service.texts.writing.reader(calls, ending)
    metrics, logprobs = wants_metrics(service, body), Logprobs(service.texts.token, top_of(chat))
    return ResponseReply(body, ticket, reader, logprobs, metrics)


class ResponseReply:
    """The answer to a submitted request.

    Args:
        body: The body of the request.
        ticket: The completion.
        reader: Parses its text.
        logprobs: Formats log-probabilities of its tokens.
        metrics: Whether to report how it was drafted.
    """

    def __init__(
        self, body: ResponsesRequest, ticket: Ticket, reader: Reader, logprobs: Logprobs, metrics: bool
    ) -> None:
        self._ticket, self._reader, self._logprobs, self._metrics = ticket, reader, logprobs, metrics
        self._output = OutputItems()
        self._head = {"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time.time()), **_echo(body)}

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            EngineError: A step has failed.
            LateError: The time has passed.
        """
        async for _ in self._events():
            pass
        return self._response(self._ticket.output.finish_reason)

    def stream(self, headers: dict[str, str]) -> StreamingResponse:
        """The answer as server-sent events; the last one says how it ended. A disconnected client ends them."""

        async def lines() -> AsyncGenerator[str]:
            number = 0
            async with aclosing(self._safe()) as events:
                async for event in events:
                    data = json.dumps({**event, "sequence_number": number}, separators=(",", ":"))
                    yield f"event: {event['type']}\ndata: {data}\n\n"
                    number += 1

        return event_stream(lines(), headers)

    async def _safe(self) -> AsyncGenerator[Told]:
        """All events, errors included."""
        try:
            yield {"type": "response.created", "response": self._response()}
            yield {"type": "response.in_progress", "response": self._response()}
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event
            whole = self._response(self._ticket.output.finish_reason)
            yield {"type": f"response.{whole['status']}", "response": whole}
        except Exception as error:  # noqa: BLE001 - the status is sent already: the stream has to tell it
            logger.info("a stream ends early: %s", error)
            told = as_api_error(error)
            yield {"type": "error", "code": told.code, "message": str(told), "param": told.param}
            failed = {"status": "failed", "error": {"code": "server_error", "message": str(told)}}
            yield {"type": "response.failed", "response": self._response() | failed}

    async def _events(self) -> AsyncGenerator[Told]:
        async with aclosing(self._ticket.deltas()) as deltas:
            async for delta in deltas:
                for event in self._grow(delta):
                    yield event

    def _grow(self, delta: Delta) -> Iterator[Told]:
        reason = delta.finish_reason
        said = self._reader.read("".join(delta.pieces), reason is not None)
        yield from self._output.grow(said, self._logprobs.chat(delta.tokens, delta.logprobs, reason))
        if reason is not None:
            yield from self._output.end(_status(reason))

    def _response(self, reason: FinishReason | None = None) -> dict[str, Any]:
        """The whole object with the answer so far."""
        ended, output = reason is not None, self._ticket.output
        status = _status(reason)
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "output": self._output.items,
            "usage": _usage(output.prompt_tokens, output.cached_tokens, len(output.tokens)) if ended else None,
            **(spec_metrics(output) if ended and self._metrics else {}),
        }


def _in_its_words(error: ApiError) -> ApiError:
    """An error of the chat with the field names of this API."""
    param, word = error.param or "", WORDS.get(error.param or "")
    return error if word is None else ApiError(error.status, str(error).replace(param, word), word, error.code)


def _status(reason: FinishReason | None) -> str:
    return {None: "in_progress", "length": "incomplete"}.get(reason, "completed")


def _usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """The request's fields that the answer repeats."""
    choice, form = body.tool_choice or "auto", body.form
    tools = [
        tool.model_dump(include={"type", "name", "description", "parameters", "strict"}) for tool in body.functions
    ]
    return {
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)},
        "tools": tools,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": "disabled",
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "metadata": body.metadata or {},
        "user": body.user,
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
    }
