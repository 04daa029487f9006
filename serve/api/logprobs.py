"""Log-probabilities of tokens in the formats of both endpoints."""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any

from medusa.engine.output import FinishReason, TokenLogprob

LEAST = -9999.0
"""Replaces minus infinity, as in OpenAI's API."""


class Logprobs:
    """Formats the log-probabilities of one completion.

    Args:
        token: Text and bytes of a token, see ``Texts.token``.
        most: Number of alternatives per token; None = no log-probabilities.
        special: Tokens that a completion's text leaves out.
        echo: The prompt, if the text begins with it.
        own: Decodes the first token, if the completion is a text of its own.
    """

    def __init__(
        self,
        token: Callable[[int], tuple[str, bytes]],
        most: int | None,
        special: Collection[int] = (),
        echo: str = "",
        own: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._token, self._most, self._special, self._echo, self._own = token, most, special, echo, own
        self._offset, self._decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def chat(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, reason: FinishReason | None
    ) -> list[dict[str, Any]] | None:
        """Log-probabilities of a chat's tokens, without an end-of-sequence token."""
        if self._most is None:
            return None
        content = []
        pairs = list(zip(tokens, logprobs or (), strict=True))
        for token, (logprob, top) in pairs[:-1] if reason == "eos" else pairs:
            others = [self._entry(*pair) for pair in list(top.items())[: self._most]]
            content.append({**self._entry(token, logprob), "top_logprobs": others})
        return content

    def plain(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None
    ) -> dict[str, list[Any]] | None:
        """Log-probabilities of a completion or its prompt; offsets continue from call to call.

        Clients find the end of a prompt by counting, so all tokens are included, also one that ended the text. The
        first token of a prompt has None.
        """
        if self._most is None:
            return None
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, logprobs or (), strict=True):
            told["tokens"].append(self._name(token))
            told["token_logprobs"].append(None if entry is None else max(entry.logprob, LEAST))
            told["top_logprobs"].append(None if entry is None else self._top(token, entry))
            told["text_offset"].append(self._offset)
            self._offset += self._width(token)
        return told

    def _width(self, token: int) -> int:
        """Characters of the returned text that end in a token."""
        text, raw = self._token(token)
        if token in self._special and not self._echo.startswith(text, self._offset):
            return 0
        width, shown = len(self._decoder.decode(raw)), self._echo[self._offset : self._offset + 1]
        if self._own is not None and not self._offset:
            shown = self._own([token])
        return width - (text.startswith(" ") and shown[:1] not in ("", " "))  # SentencePiece may leave out a space

    def _top(self, token: int, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the written one."""
        best = dict(list(entry.top.items())[: self._most]) | {token: entry.logprob}
        return {self._name(other): max(logprob, LEAST) for other, logprob in best.items()}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def _name(self, token: int) -> str:
        """The text of a token; for part of a character its bytes in OpenAI's notation, which are unique."""
        text, raw = self._token(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if "\ufffd" in text else text
