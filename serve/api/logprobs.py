"""Log-probabilities of tokens in the shapes of both endpoints."""

from collections.abc import Callable, Sequence
from typing import Any

from medusa.engine.output import FinishReason, TokenLogprob

LEAST = -9999.0
"""In place of minus infinity, as OpenAI says it."""


class Logprobs:
    """Tells those of one completion with the tokens' texts.

    Args:
        token: Text and bytes of a token, see ``Texts.token``.
        most: Alternatives that are told; None = nothing is told.
    """

    def __init__(self, token: Callable[[int], tuple[str, bytes]], most: int | None) -> None:
        self._token, self._most = token, most
        self._offset = 0

    def chat(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, reason: FinishReason | None
    ) -> list[dict[str, Any]] | None:
        """Of a chat, whose end-of-sequence token is not told: of these tokens, of which the last may have ended it."""
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
        """Of a completion, or of its prompt; offsets go on from one call to the next.

        Clients tell where a prompt ends by counting, so each token is told, one that ended the text too. None stands
        at the first token of a prompt.
        """
        if self._most is None:
            return None
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, logprobs or (), strict=True):
            told["tokens"].append(self._name(token))
            told["token_logprobs"].append(None if entry is None else max(entry.logprob, LEAST))
            told["top_logprobs"].append(None if entry is None else self._top(token, entry))
            told["text_offset"].append(self._offset)
            self._offset += len(self._token(token)[0])
        return told

    def _top(self, token: int, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the one that stands there."""
        best = dict(list(entry.top.items())[: self._most]) | {token: entry.logprob}
        return {self._name(other): max(logprob, LEAST) for other, logprob in best.items()}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def _name(self, token: int) -> str:
        """The text of a token; of a part of a character its bytes, as OpenAI writes them: others have the same text."""
        text, raw = self._token(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if "\ufffd" in text else text
