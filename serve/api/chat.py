"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from medusa import Output
from medusa.engine.output import FinishReason
from medusa.serve.api.asking import Wanted, ask
from medusa.serve.api.constraints import constraint_of
from medusa.serve.api.errors import refused
from medusa.serve.api.logprobs import Logprobs
from medusa.serve.api.messages import text_of
from medusa.serve.api.protocol import ChatRequest
from medusa.serve.api.reply import REASONS, Kind, Reply
from medusa.serve.api.service import Service
from medusa.serve.api.texts import described
from medusa.serve.api.tools import Calls, calls_of
from medusa.serve.reading.events import Argued, Called, Event, Reader, Reasoned, Said, joined
from medusa.serve.request import Asked, Delta

KIND = Kind("chatcmpl", "chat.completion", "chat.completion.chunk")


async def chat(service: Service, body: ChatRequest, client: str) -> Reply:
    """Render, check and submit a request.

    Raises:
        ApiError: The request cannot be served.
    """
    calls = calls_of(body)
    requests, ending = await asked(service, body, calls, client)
    texts, reasons = service.texts, body.include_reasoning is not False
    choices = [
        _Message(calls, texts.writing.reader(calls, ending), Logprobs(texts.token, top_of(body)), reasons)
        for _ in requests
    ]
    return Reply(service, body, KIND, choices, await service.start(requests))


async def asked(service: Service, body: ChatRequest, calls: Calls, client: str) -> tuple[list[Asked], str]:
    """The requests for the engine, and the end of their prompt, by which answers are read.

    Raises:
        ApiError: The request cannot be served.
    """
    if len({body.max_tokens, body.max_completion_tokens} - {None}) > 1:
        raise refused("max_tokens and max_completion_tokens mean the same; give one of them", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs needs logprobs; set logprobs, or leave it out", "top_logprobs")
    texts = service.texts
    if body.logprobs:
        await service.aside(texts.prepare)
    prompt = await service.aside(texts.render, body.messages, body, described(calls.tools))
    ending = await service.aside(texts.ending, prompt)
    constraint = await constraint_of(service, body, calls, texts.writing, ending)
    predicted = list[int]()
    if body.prediction is not None:
        predicted = await service.aside(texts.encode, text_of(body.prediction.content), False)
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tagged = texts.writing.needs_special_tokens(calls)
    wanted = Wanted([prompt], longest, top_of(body), tagged=tagged, constraint=constraint, predicted=predicted)
    return ask(service, body, wanted, client), ending


def top_of(body: ChatRequest) -> int | None:
    """Number of alternatives per token; None = no log-probabilities."""
    return (body.top_logprobs or 0) if body.logprobs else None


class _Message:
    """See ``Choice``."""

    def __init__(self, calls: Calls, reader: Reader, logprobs: Logprobs, reasons: bool) -> None:
        self._how, self._reader, self._logprobs, self._reasons = calls, reader, logprobs, reasons
        self._calls, self._traced = 0, list[tuple[str, bool]]()

    def whole(self, output: Output) -> dict[str, Any]:
        events = self._events(output.text, True)
        content, calls = "".join(event.text for event in events if isinstance(event, Said)), _whole(events)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning := "".join(event.text for event in events if isinstance(event, Reasoned)):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = self._logprobs.chat(output.tokens, output.logprobs, output.finish_reason)
        told = None if logprobs is None else {"content": logprobs, "refusal": None}
        return {"message": message, "logprobs": told, "finish_reason": self._reason(output.finish_reason)}

    def opening(self) -> list[dict[str, Any]]:
        return [_delta({"role": "assistant", "content": None if self._how.required else ""})]

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        events, self._traced = [], []
        for piece in delta.pieces:
            found = self._events(piece, False)
            events += found
            self._traced += [(event.text, piece.drafted) for event in found if isinstance(event, Said)]
        if delta.finish_reason is not None:
            found = self._events("", True)
            events += found
            self._traced += [(event.text, False) for event in found if isinstance(event, Said)]
        events = joined(events)
        chunks = [_delta(self._said(event)) for event in events]
        if logprobs := self._logprobs.chat(delta.tokens, delta.logprobs, delta.finish_reason):
            chunks = chunks or [self.blank()]
            chunks[0]["logprobs"] = {"content": logprobs, "refusal": None}
        if delta.finish_reason is not None:
            chunks.append(_delta({}, self._reason(delta.finish_reason)))
        return chunks

    def blank(self) -> dict[str, Any]:
        return _delta({})

    def traced(self, delta: Delta) -> list[tuple[str, bool]]:
        return self._traced

    def _events(self, text: str, last: bool) -> list[Event]:
        events = self._reader.read(text, last)
        return [event for event in events if self._reasons or not isinstance(event, Reasoned)]

    def _said(self, event: Event) -> dict[str, Any]:
        match event:
            case Said(text):
                return {"content": text}
            case Reasoned(text):
                return {"reasoning_content": text}
            case Called():
                self._calls += 1
                return {"tool_calls": [{"index": self._calls - 1, **_call(event)}]}
            case Argued(text):
                return {"tool_calls": [{"index": self._calls - 1, "function": {"arguments": text}}]}

    def _reason(self, reason: FinishReason | None) -> str:
        ended = REASONS[reason or "abort"]
        return "tool_calls" if self._reader.called and not self._how.name and ended == "stop" else ended


def _whole(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The tool calls of an answer."""
    calls = list[dict[str, Any]]()
    for event in events:
        if isinstance(event, Called):
            calls.append(_call(event))
        elif isinstance(event, Argued):
            calls[-1]["function"]["arguments"] += event.text
    return calls


def _call(called: Called) -> dict[str, Any]:
    return {"id": called.id, "type": "function", "function": {"name": called.name, "arguments": ""}}


def _delta(said: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"delta": said, "logprobs": None, "finish_reason": reason}
