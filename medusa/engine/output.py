"""One growing completion on the host: tokens, text, and why it ended."""

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from medusa.sampling import SamplingParams

FinishReason = Literal["eos", "stop", "length", "abort"]

CONTEXT = 8
"""Tokens of the prompt that decide how a text goes on from it."""


class Piece(str):
    """A piece of streamed text.

    Attributes:
        drafted: True where its tokens were accepted from the draft, false where they are the base's own bonus tokens.
    """

    drafted: bool

    def __new__(cls, text: str, drafted: bool = False) -> Self:
        """A string that remembers where it comes from."""
        piece = super().__new__(cls, text)
        piece.drafted = drafted
        return piece


class TokenLogprob(NamedTuple):
    """Log-probabilities in nats at one place of the completion, by the base's own distribution there."""

    logprob: float
    """Log-probability of the token at this place."""
    top: dict[int, float]
    """Log-probabilities of the most likely token ids, the best first."""


@dataclass
class Output:
    """The completion of one prompt.

    Attributes:
        tokens: New token ids; an end-of-sequence token is the last of them.
        drafted: Whether each token was accepted from the draft.
        text: The new text, without special tokens and without the stop string.
        prompt_tokens: Length of the prompt in tokens.
        steps: Passes that gave tokens: the last pass of the prompt, and the passes that verified drafts.
        draft_tokens: Tokens that were drafted and verified in these passes.
        accepted: Number of steps that accepted 0, 1, 2, ... of their draft tokens.
        finish_reason: "eos", "stop" (a stop string), "length" (a limit) or "abort" (removed); None while it grows.
        seed: The seed of sampling, see ``SamplingParams``; None if none was given and decoding was greedy.
        seconds: Wall-clock time from the first token to the last.
        cached_tokens: Tokens of the prompt that were found in the cache (see ``Prefix`` and ``BlockPool``).
        logprobs: Log-probabilities of every token, if ``SamplingParams.logprobs`` asks for them.
        prompt_logprobs: The same for every token of the prompt, if asked for; None for the first token.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int | None = None
    seconds: float = 0.0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per pass, over the whole completion."""
        return len(self.tokens) / max(self.steps, 1)

    @property
    def tokens_per_second(self) -> float:
        """Decode speed, without the prefill and the token that it gives."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds and self.tokens else 0.0


class Completion:
    """Grows one ``Output`` token by token, so that an end inside an accepted span cuts exactly there.

    Args:
        tokenizer: Decodes the tokens.
        prompt_tokens: Length of the prompt.
        params: Limits, stop strings, and whether the end-of-sequence token counts.
        room: Tokens that the base's context has left after the prompt.
        eos_ids: Tokens that end the completion.
        incremental: Decode text token by token, for streaming. Otherwise the text is decoded once, at the end, unless
            there are stop strings to find: decoding text costs about as much as a layer of a small model.
        before: The last tokens of the text that this one goes on from, without special ones.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_tokens: int,
        params: SamplingParams,
        room: int,
        eos_ids: frozenset[int],
        incremental: bool = False,
        before: SequenceOf[int] = (),
    ) -> None:
        self.output = Output(
            prompt_tokens,
            seed=params.seed,
            logprobs=None if params.logprobs is None else [],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self.max_new_tokens = min(params.max_new_tokens, room)
        self._tokenizer = tokenizer
        self._max_steps = params.max_steps
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._skip_special = params.skip_special_tokens
        self._stop = tuple(params.stop)
        self._incremental = incremental or bool(self._stop)
        self._text = ""
        self._decoded = list(before)
        while self._decoded and tokenizer.decode(self._decoded).endswith("\ufffd"):  # it begins or ends in a character
            del self._decoded[0]
        self._window, self._read = 0, len(self._decoded)
        self._shown = 0
        self._begin = 0.0

    @property
    def active(self) -> bool:
        """Whether it still grows."""
        return self.output.finish_reason is None

    def start_clock(self) -> None:
        """Begin to count ``output.seconds``, after the prefill."""
        self._begin = time.perf_counter()

    def extend(
        self, tokens: SequenceOf[int], logprobs: SequenceOf[TokenLogprob] = (), draft_tokens: int = 0
    ) -> list[Piece]:
        """Add the tokens of one step, the last of which is the base's own; returns the new final text.

        Args:
            tokens: Token ids, at least one.
            logprobs: Log-probabilities of each, if the request asks for them.
            draft_tokens: Number of drafted tokens.
        """
        output, pieces, before = self.output, [], len(self.output.tokens)
        output.steps += 1
        output.draft_tokens += draft_tokens
        for index, token in enumerate(tokens):
            output.tokens.append(token)
            if self._skip_special or token not in self._eos_ids:
                self._decoded.append(token)
            output.drafted.append(index < len(tokens) - 1)
            if token in self._eos_ids:
                output.finish_reason = "eos"
            elif len(output.tokens) >= self.max_new_tokens:
                output.finish_reason = "length"
            if self._incremental or not self.active:
                pieces += self._new_text()
            if not self.active:
                break
        accepted = min(len(output.tokens) - before, len(tokens) - 1)  # those behind the end do not count
        output.accepted += [0] * (accepted + 1 - len(output.accepted))
        output.accepted[accepted] += 1
        if output.logprobs is not None:
            output.logprobs += logprobs[: len(output.tokens) - len(output.logprobs)]
        if self.active and output.steps == self._max_steps:
            pieces += self.end("length")
        output.seconds = time.perf_counter() - self._begin
        return pieces

    def abort(self) -> None:
        """End a completion that still grows; its text is what was released so far."""
        self.output.finish_reason = "abort"

    def end(self, reason: FinishReason) -> list[Piece]:
        """End a completion that still grows, from outside; returns the text that was held back."""
        self.output.finish_reason = reason
        return self._new_text()

    def _new_text(self) -> list[Piece]:
        self._decode(final=not self.active)
        self._cut_at_stop()
        text = self._release()
        return [Piece(text, self.output.drafted[-1])] if text else []

    def _decode(self, final: bool) -> None:
        """Append the text of new tokens, once it no longer ends inside a character."""
        tokens, decode = self._decoded, self._tokenizer.decode
        before = decode(tokens[self._window : self._read], skip_special_tokens=self._skip_special)
        after = decode(tokens[self._window :], skip_special_tokens=self._skip_special)
        if len(after) > len(before) and (final or not after.endswith("\ufffd")):
            self._text += after[len(before) :]
            self._window, self._read = self._read, len(tokens)

    def _cut_at_stop(self) -> None:
        found = [at for stop in self._stop if (at := self._text.find(stop, max(0, self._shown - len(stop)))) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.output.finish_reason = "stop"

    def _release(self) -> str:
        """Text to release: all of it at the end, before that without a possible beginning of a stop string."""
        held = 0
        if self.active:
            for stop in self._stop:
                most = min(len(stop), len(self._text) - self._shown + 1)
                held = max([held, *(n for n in range(1, most) if self._text.endswith(stop[:n]))])
        until = max(len(self._text) - held, self._shown)
        piece = self._text[self._shown : until]
        self._shown = until
        self.output.text = self._text[:until]
        return piece
