"""Log-probabilities of emitted tokens in the shapes of both endpoints; an end-of-sequence token is not told."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from medusa.engine.output import FinishReason, TokenLogprob


class Logprobs:
    """Tells those of one completion with the tokens' texts.

    Args:
        tokenizer: The base's.
        most: Alternatives that are told; None = nothing is told.
    """

    def __init__(self, tokenizer: Any, most: int | None) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._offset = 0

    def chat(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        """Of a chat completion: of these tokens, of which the last may have ended it."""
        if self._most is None:
            return None
        content = []
        for token, (logprob, top) in _of_text(tokens, logprobs, reason):
            others = [self._entry(*pair) for pair in list(top.items())[: self._most]]
            content.append({**self._entry(token, logprob), "top_logprobs": others})
        return {"content": content, "refusal": None}

    def plain(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, reason: FinishReason | None
    ) -> dict[str, Any] | None:
        """Of a completion; offsets go on from one call to the next."""
        if self._most is None:
            return None
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, (logprob, top) in _of_text(tokens, logprobs, reason):
            text = self._text(token)
            told["tokens"].append(text)
            told["token_logprobs"].append(logprob)
            told["top_logprobs"].append({self._text(other): p for other, p in list(top.items())[: self._most]})
            told["text_offset"].append(self._offset)
            self._offset += len(text)
        return told

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return _text_of(self._tokenizer, token)


@lru_cache(maxsize=1 << 16)
def _text_of(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token])
    return text


def _of_text(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, reason: FinishReason | None
) -> list[tuple[int, TokenLogprob]]:
    pairs = list(zip(tokens, logprobs or (), strict=True))
    return pairs[:-1] if reason == "eos" else pairs
