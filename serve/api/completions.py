"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from serve.api.constraints import constraint_of
from serve.api.errors import refused
from serve.api.logprobs import Logprobs
from serve.api.protocol import CompletionRequest
from serve.api.reply import REASONS, Reply
from serve.api.service import Service
from serve.request import Delta, Ticket

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
    readers = [Logprobs(service.tokenizer, body.logprobs) for _ in requests]
    return Reply(service, body, _Text(echoes, readers), await service.start(requests))


class _Text:
    """``Shape`` of the endpoint."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, echoes: Sequence[str], readers: Sequence[Logprobs]) -> None:
        self._echoes, self._readers = echoes, readers

    def whole(self, index: int, ticket: Ticket) -> dict[str, Any]:
        output = ticket.output
        logprobs = self._readers[index].plain(output.tokens, output.logprobs, output.finish_reason)
        reason = REASONS[output.finish_reason or "abort"]
        return _choice(index, self._echoes[index] + output.text, reason, logprobs)

    def opening(self, index: int) -> dict[str, Any] | None:
        return _choice(index, self._echoes[index]) if self._echoes[index] else None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = self._readers[index].plain(delta.tokens, delta.logprobs, delta.finish_reason)
        reason = REASONS[delta.finish_reason] if delta.finish_reason else None
        return _choice(index, "".join(delta.pieces), reason, logprobs)


def _choice(index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


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
