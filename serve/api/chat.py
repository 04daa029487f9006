"""POST /v1/chat/completions."""

from typing import Any

from medusa import Output
from medusa.engine.output import FinishReason
from serve.api.constraints import constraint_of
from serve.api.errors import refused
from serve.api.logprobs import Logprobs
from serve.api.protocol import ChatRequest
from serve.api.reply import REASONS, Kind, Reply
from serve.api.service import Service
from serve.api.tools import BEGIN, Calls, calls_of, held, numbered
from serve.request import Delta

KIND = Kind("chatcmpl", "chat.completion", "chat.completion.chunk")


async def chat(service: Service, body: ChatRequest, client: str) -> Reply:
    """Render, check, and send a request on its way.

    Raises:
        ApiError: It cannot be served.
    """
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise refused("max_tokens and max_completion_tokens mean the same; give one of them", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs needs logprobs; set logprobs, or leave it out", "top_logprobs")
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    calls, top = calls_of(body), (body.top_logprobs or 0) if body.logprobs else None
    constraint = await constraint_of(service, body, calls.schema)
    prompt = await service.aside(service.render, body.messages, calls.tools)
    requests = service.requests(body, [prompt], longest, top, constraint, client)
    choices = [_Message(calls, Logprobs(service.tokenizer, top)) for _ in requests]
    return Reply(service, body, KIND, choices, await service.start(requests))


class _Message:
    """``Choice`` of the endpoint; what may become a call is held back from a stream."""

    def __init__(self, calls: Calls, logprobs: Logprobs) -> None:
        self._calls, self._logprobs = calls, logprobs
        self._held, self._calling = "", calls.schema is not None

    def whole(self, output: Output) -> dict[str, Any]:
        content, calls = self._calls.read(output.text)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message,
            "logprobs": self._logprobs.chat(output.tokens, output.logprobs, output.finish_reason),
            "finish_reason": self._reason(output.finish_reason, bool(calls)),
        }

    def opening(self) -> dict[str, Any]:
        return _delta({"role": "assistant", "content": ""})

    def piece(self, delta: Delta) -> dict[str, Any]:
        text, calls = self._sorted("".join(delta.pieces), delta.finish_reason is not None)
        said: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            said["tool_calls"] = numbered(calls)
        logprobs = self._logprobs.chat(delta.tokens, delta.logprobs, delta.finish_reason)
        reason = self._reason(delta.finish_reason, bool(calls)) if delta.finish_reason else None
        return _delta(said, reason, logprobs)

    def _sorted(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text to tell now, and at the end what is called."""
        if not self._calls.wanted:
            return text, []
        self._held += text
        self._calling |= BEGIN in self._held
        if last:
            return self._calls.read(self._held)
        if self._calling:
            return "", []
        until = len(self._held) - held(self._held)
        text, self._held = self._held[:until], self._held[until:]
        return text, []

    def _reason(self, reason: FinishReason | None, called: bool) -> str:
        return "tool_calls" if called and not self._calls.name else REASONS[reason or "abort"]


def _delta(said: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"delta": said, "logprobs": logprobs, "finish_reason": reason}
