"""POST /v1/completions."""

from typing import Any

from medusa import Output
from serve.api.constraints import constraint_of
from serve.api.errors import refused
from serve.api.logprobs import Logprobs
from serve.api.protocol import CompletionRequest
from serve.api.reply import REASONS, Kind, Reply
from serve.api.service import Service
from serve.request import Delta

KIND = Kind("cmpl", "text_completion", "text_completion")
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def complete(service: Service, body: CompletionRequest, client: str) -> Reply:
    """Encode, check, and send a request on its way.

    Raises:
        ApiError: It cannot be served.
    """
    if body.echo and body.logprobs is not None:
        raise refused("echo with logprobs is not supported: only those of new tokens are known", "logprobs")
    constraint = await constraint_of(service, body)
    prompts = await service.aside(_encode, service, body.prompt)
    longest = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    requests = service.requests(body, prompts, longest, body.logprobs, constraint, client)
    echoes = [""] * len(requests)
    if body.echo:
        echoes = await service.aside(lambda: [service.tokenizer.decode(request.prompt) for request in requests])
    choices = [_Text(echo, Logprobs(service.tokenizer, body.logprobs)) for echo in echoes]
    return Reply(service, body, KIND, choices, await service.start(requests))


class _Text:
    """``Choice`` of the endpoint."""

    def __init__(self, echo: str, logprobs: Logprobs) -> None:
        self._echo, self._logprobs = echo, logprobs

    def whole(self, output: Output) -> dict[str, Any]:
        logprobs = self._logprobs.plain(output.tokens, output.logprobs, output.finish_reason)
        return _choice(self._echo + output.text, REASONS[output.finish_reason or "abort"], logprobs)

    def opening(self) -> dict[str, Any] | None:
        return _choice(self._echo) if self._echo else None

    def piece(self, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs.plain(delta.tokens, delta.logprobs, delta.finish_reason)
        return _choice("".join(delta.pieces), REASONS[delta.finish_reason] if delta.finish_reason else None, logprobs)


def _choice(text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "logprobs": logprobs, "finish_reason": reason}


def _encode(service: Service, prompt: Any) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
        ApiError: There is none.
    """
    if isinstance(prompt, str):
        return [service.encode(prompt)]
    if not prompt:
        raise refused("prompt (an empty list) holds nothing to complete; give at least one prompt", "prompt")
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return [service.encode(one) if isinstance(one, str) else list(one) for one in prompt]
