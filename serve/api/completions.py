"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from medusa import Output
from medusa.engine.output import TokenLogprob
from medusa.serve.api.asking import Wanted, ask, check_count
from medusa.serve.api.constraints import constraint_of
from medusa.serve.api.errors import refused, too_long
from medusa.serve.api.logprobs import Logprobs
from medusa.serve.api.protocol import CompletionRequest
from medusa.serve.api.reply import REASONS, Kind, Reply
from medusa.serve.api.service import Service
from medusa.serve.request import Asked, Delta

KIND = Kind("cmpl", "text_completion", "text_completion")
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


async def complete(service: Service, body: CompletionRequest, client: str) -> Reply:
    """Encode, check and submit a request.

    Raises:
        ApiError: The request cannot be served.
    """
    if body.best_of not in (None, 1, body.n):
        raise refused(f"best_of ({body.best_of}) other than n is not supported; leave it out", "best_of")
    constraint = await constraint_of(service, body)
    if body.logprobs is not None:
        await service.aside(service.texts.prepare)
    texts, prompts = await service.aside(_encode, service, body)
    told = body.logprobs if body.echo else None
    wanted = Wanted(
        prompts,
        body.max_tokens,
        body.logprobs,
        usual=DEFAULT_MAX_TOKENS,
        prompt_logprobs=told if told is not None else 0 if body.max_tokens == 0 else None,
        constraint=constraint,
        param="prompt",
        texts=texts,
    )
    requests = ask(service, body, wanted, client)
    choices = await service.aside(lambda: [_Text(service, body, request) for request in requests])
    return Reply(service, body, KIND, choices, await service.start(requests))


class _Text:
    """See ``Choice``."""

    def __init__(self, service: Service, body: CompletionRequest, asked: Asked) -> None:
        texts = service.texts
        self._prompt, self._echo = (asked.prompt, asked.text or "") if body.echo else ([], "")
        own = texts.decode if asked.text is None else None
        self._logprobs = Logprobs(texts.token, body.logprobs, texts.special, self._echo, own)

    def whole(self, output: Output) -> dict[str, Any]:
        told = self._told(output.tokens, output.logprobs, output.prompt_logprobs)
        return _choice(self._echo + output.text, REASONS[output.finish_reason or "abort"], told)

    def opening(self) -> list[dict[str, Any]]:
        return []

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        echo, self._echo = self._echo, ""
        text, told = echo + "".join(delta.pieces), self._told(delta.tokens, delta.logprobs, delta.prompt_logprobs)
        reason = REASONS.get(delta.finish_reason or "")
        return [_choice(text, reason, told)] if text or reason or told else []

    def blank(self) -> dict[str, Any]:
        return _choice("")

    def traced(self, delta: Delta) -> list[tuple[str, bool]]:
        return [(text, text.drafted) for text in delta.pieces]

    def _told(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob | None] | None,
        before: Sequence[TokenLogprob | None] | None,
    ) -> dict[str, Any] | None:
        """Log-probabilities of tokens, after those of the prompt if it is echoed."""
        if before is not None and self._prompt:
            tokens, logprobs = [*self._prompt, *tokens], [*before, *(logprobs or ())]
        return self._logprobs.plain(tokens, logprobs) if tokens else None


def _choice(text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "logprobs": logprobs, "finish_reason": reason}


def _encode(service: Service, body: CompletionRequest) -> tuple[list[str | None], list[list[int]]]:
    """Text of every prompt, None if it was sent as token ids, and its token ids.

    Raises:
        ApiError: There is no prompt, or too many, or a too long one.
    """
    prompt: Any = body.prompt
    if prompt == []:
        raise refused("prompt (an empty list) holds nothing to complete; give at least one prompt", "prompt")
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    check_count(service, body, len(prompts))  # encoding them would keep other clients waiting
    found, context = list[list[int]](), service.engine.model.base.context_length
    special = body.add_special_tokens is not False
    for one in prompts:
        found.append(service.texts.encode(one, special) if isinstance(one, str) else list(one))
        if (size := len(found[-1])) > context:
            raise too_long(context, f"the prompt has {size}, which leaves no room for an answer", "prompt")
    texts = [one if isinstance(one, str) else service.texts.decode(one) if body.echo else None for one in prompts]
    return texts, found
