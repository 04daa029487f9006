"""Answers, whole or as streams, for both endpoints."""

import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from fastapi.responses import StreamingResponse

from medusa import Output
from medusa.drafters.prediction import PredictionDrafter
from medusa.serve.api.errors import as_api_error
from medusa.serve.api.protocol import Sampling, Shared, StreamOptions
from medusa.serve.api.service import Service, merged
from medusa.serve.request import Delta, Ticket

logger = logging.getLogger(__name__)

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "stop"}
"""OpenAI's names of finish reasons."""


class Kind(NamedTuple):
    """The names of an endpoint's answers."""

    prefix: str
    """Prefix of their ids."""
    whole: str
    chunk: str


class Choice(Protocol):
    """The format of one completion at an endpoint."""

    def whole(self, output: Output) -> dict[str, Any]:
        """The whole completion."""

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks of a stream, if there are any."""

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of new text; at the end at least one, with the finish reason."""

    def blank(self) -> dict[str, Any]:
        """A chunk without text."""

    def traced(self, delta: Delta) -> list[tuple[str, bool]]:
        """The text of the answer in ``pieces`` of the same delta, and whether it was drafted."""


class Reply:
    """The answer to a submitted request.

    Args:
        service: The common service.
        body: The body of the request.
        kind: The names of the endpoint.
        choices: Formats of the completions, in their order.
        tickets: The completions; those of one prompt are consecutive.
    """

    def __init__(
        self, service: Service, body: Sampling, kind: Kind, choices: Sequence[Choice], tickets: Sequence[Ticket]
    ) -> None:
        self._body, self._kind, self._choices, self._tickets = body, kind, choices, tickets
        self._head = {"id": f"{kind.prefix}-{uuid4().hex}", "created": int(time.time())}
        self._head["model"] = body.model
        if (params := tickets[0].asked.params).temperature:
            self._head["seed"] = params.seed
        self._metrics = len(tickets) == 1 and wants_metrics(service, body)

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            EngineError: A step has failed.
            LateError: The time has passed.
        """
        async for _ in merged(self._tickets):
            pass
        pairs = enumerate(zip(self._choices, self._tickets, strict=True))
        choices = [{"index": index, **choice.whole(ticket.output)} for index, (choice, ticket) in pairs]
        told = [len(ticket.output.tokens) for ticket in self._tickets]
        body = {**self._head, "object": self._kind.whole, "choices": choices, "usage": self._usage(told)}
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._tickets[0].asked.prompt
            for choice, ticket in zip(choices, self._tickets, strict=True):
                choice |= {"token_ids": ticket.output.tokens, "prompt_token_ids": ticket.asked.prompt}
        return body | self._told_metrics()

    def stream(self, headers: dict[str, str]) -> StreamingResponse:
        """The answer as server-sent events; an error is the last one. A disconnected client ends them."""

        async def events() -> AsyncGenerator[str]:
            try:
                async with aclosing(self._chunks()) as chunks:
                    async for chunk in chunks:
                        yield _event(chunk)
            except Exception as error:  # noqa: BLE001 - the status is sent already: the stream has to tell it
                logger.info("a stream ends early: %s", error)
                yield _event(as_api_error(error).body())
            yield "data: [DONE]\n\n"

        return event_stream(events(), headers)

    async def _chunks(self) -> AsyncGenerator[dict[str, Any]]:
        body, options = self._body, self._body.stream_options or StreamOptions()
        told = [0] * len(self._tickets)
        head, fresh = {**self._head, "object": self._kind.chunk}, set(range(len(told)))

        def chunk(index: int, piece: dict[str, Any]) -> dict[str, Any]:
            prompt, usage = dict[str, Any](), dict[str, Any]()
            if body.return_token_ids and index in fresh:
                prompt = {"prompt_token_ids": self._tickets[index].asked.prompt}
            if options.include_usage:
                usage = {"usage": self._usage(told) if options.continuous_usage_stats else None}
            fresh.discard(index)
            return {**head, "choices": [{"index": index, **piece, **prompt}], **prompt, **usage}

        for index, choice in enumerate(self._choices):
            for piece in choice.opening():
                yield chunk(index, piece)
        async with aclosing(merged(self._tickets)) as deltas:
            async for index, delta in deltas:
                told[index] += len(delta.tokens)
                for piece in self._pieces(index, delta):
                    yield chunk(index, piece)
        last = self._told_metrics() | ({"usage": self._usage(told)} if options.include_usage else {})
        if last:
            yield {**head, "choices": [], **last}

    def _pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of a completion's new text; the first has the information about its tokens."""
        first: dict[str, Any] = {}
        if self._body.return_token_ids:
            first["token_ids"] = list(delta.tokens)
        pieces = self._choices[index].pieces(delta)
        if self._body.speculation is not None and self._body.speculation.trace and (pieces or delta.pieces):
            first["pieces"] = self._choices[index].traced(delta)
            for piece in pieces[1:]:
                piece["pieces"] = []
        if first:
            pieces = pieces or [self._choices[index].blank()]
            pieces[0] |= first
        return pieces

    def _usage(self, told: Sequence[int]) -> dict[str, Any]:
        """Numbers of read and written tokens; a prompt counts once for all its completions."""
        prompts = [ticket.output for ticket in self._tickets[:: self._body.n or 1]]
        prompt, completion = sum(output.prompt_tokens for output in prompts), sum(told)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in prompts)},
            **self._predicted(),
        }

    def _predicted(self) -> dict[str, Any]:
        """Numbers of right and wrong tokens of a prediction."""
        if not isinstance(self._tickets[0].asked.speculation.drafter, PredictionDrafter):
            return {}
        outputs = [ticket.output for ticket in self._tickets]
        right = sum(_accepted(output) for output in outputs)
        wrong = sum(output.draft_tokens for output in outputs) - right
        told = {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}
        return {"completion_tokens_details": told}

    def _told_metrics(self) -> dict[str, Any]:
        return spec_metrics(self._tickets[0].output) if self._metrics else {}


def wants_metrics(service: Service, body: Shared) -> bool:
    """Whether an answer has ``spec_metrics``."""
    asked = body.speculation.metrics if body.speculation is not None else None
    return service.settings.spec_metrics if asked is None else asked


def spec_metrics(output: Output) -> dict[str, Any]:
    """``metrics`` of a completion in vLLM's format."""
    accepted = _accepted(output)
    figures = {
        "mean_acceptance_length": 1 + accepted / max(1, output.steps),
        "draft_acceptance_rate": accepted / max(1, output.draft_tokens),
        "acceptance_histogram": list(output.accepted),
        "num_spec_steps": output.steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": output.draft_tokens,
    }
    return {"metrics": {"speculative_decoding": figures}}


def _accepted(output: Output) -> int:
    """Number of accepted draft tokens."""
    return sum(count * depth for depth, count in enumerate(output.accepted))


def event_stream(events: AsyncIterator[str], headers: dict[str, str]) -> StreamingResponse:
    """Server-sent events as a response that proxies do not buffer."""
    passing = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=passing | headers)


def _event(body: dict[str, Any]) -> str:
    """One event in ASCII, because some readers split lines at other characters too."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
