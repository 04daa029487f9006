"""Prompts are computed before they are continued: in chunks, beside the steps of others or between two of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.base.verify import verify_together
from medusa.cache import SlotCache
from medusa.state import DecodeState, latest
from medusa.tree import Draft

CHUNK = 512
"""Tokens of a prompt that one pass of a prefill computes, at most."""
ROUND_TO = 16
"""Prompts that end within so many tokens of each other end in one pass."""


class Prefill:
    """Computes the rows of prompts, chunk by chunk.

    Each pass is one ``chunk``, whose hidden states ``take`` is given. Once all are ``done``, ``state`` is what the
    first step starts from: the last token of each prompt is the first root. Its row was computed with the others, so
    the first step needs no pass of its own (``first_step``).

    Args:
        base: The frozen base.
        cache: A cache of B slots: empty, or with the rows of the first tokens of each prompt; at least its last two
            tokens must be missing, since the pass over the last but one gives the state's hidden state.
        prompts: Token ids of B prompts, at least one each; the longest first, where there is a choice: then no pass
            computes more than ``ROUND_TO`` rows of padding per prompt.
        seeds: One per prompt, None = 0.
        chunk: Tokens of a prompt per forward pass, at most; bounds the memory of long prompts. A base that decodes
            plainly gets one at a time.
        roots: Compute the last token of each prompt too; otherwise the first step does.

    Attributes:
        cache: The given one; it holds all of each prompt but its last token, whose row stands behind them.
        ends: [B, F] hidden states at the last tokens, once they are computed.
        logits: [B, V] the base's at the last tokens, from ``logits_beside``; None until all are done.
    """

    def __init__(
        self,
        base: BaseModel,
        cache: SlotCache,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        chunk: int = CHUNK,
        roots: bool = True,
    ) -> None:
        self.cache, self._chunk, self._roots = cache, 1 if base.decoding == "plain" else chunk, int(roots)
        batch, width = len(prompts), max(map(len, prompts))
        padded = [[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts]
        self._history_BT = torch.tensor(padded, device=base.device)
        self._hidden_BF = torch.zeros(batch, base.feature_size, dtype=base.dtype, device=base.device)
        self._seeds_B = torch.tensor(seeds or [0] * batch, device=base.device)
        pairs = zip(prompts, cache.host_lengths, strict=True)
        self._missing = [len(prompt) - 1 + self._roots - length for prompt, length in pairs]
        self._counts: list[int] = []  # tokens of the chunk under way
        self.ends = torch.zeros_like(self._hidden_BF)
        self.logits: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is missing."""
        return not any(self._missing)

    @property
    def state(self) -> DecodeState:
        """What the first step starts from; the hidden state of a prompt of one token is zero."""
        lengths_B = self.cache.lengths
        roots_B = self._history_BT.gather(1, lengths_B[:, None])[:, 0]
        active_B = torch.ones_like(roots_B, dtype=torch.bool)
        return DecodeState(
            roots_B, self._hidden_BF, active_B, self._history_BT, lengths_B, self._seeds_B, starts=lengths_B + 1
        )

    @property
    def rows(self) -> int:
        """Tokens of the next chunk."""
        return sum(self._next())

    def chunk(self) -> Draft:
        """The next tokens of the first prompts, as far as the shortest reaches that is not complete."""
        self._counts = self._next()
        slots, index_C = len(self._counts), torch.arange(max(self._counts), device=self._history_BT.device)
        places_bC = (self.cache.lengths[:slots, None] + index_C).clamp(max=self._history_BT.shape[1] - 1)
        return Draft.chain(self._history_BT[:slots].gather(1, places_bC))

    @torch.inference_mode()
    def take(self, hidden_bCF: Tensor) -> None:
        """Keep the rows of the chunk, whose hidden states these are."""
        cache, device = self.cache, hidden_bCF.device
        counts, slots = self._counts, len(self._counts)
        pairs = zip(counts, self._missing[:slots], strict=True)
        last = [self._roots if 0 < count == missing else 0 for count, missing in pairs]
        kept = [count - root for count, root in zip(counts, last, strict=True)]
        kept_b = torch.tensor(kept, device=device)
        ends_b = torch.tensor([count * root for count, root in zip(counts, last, strict=True)], device=device)
        next_C = torch.arange(1, hidden_bCF.shape[1] + 1, device=device)
        next_bC = (cache.lengths[:slots, None] + next_C).clamp(max=self._history_BT.shape[1] - 1)
        with cache.leading(slots):
            cache.extend(kept_b)
            cache.grow(kept)
        for follower in cache.observers:
            follower.observe(hidden_bCF, self._history_BT[:slots].gather(1, next_bC), kept)
        self._hidden_BF[:slots] = latest(hidden_bCF, kept_b, self._hidden_BF[:slots])
        self.ends[:slots] = latest(hidden_bCF, ends_b, self.ends[:slots])
        for slot, count in enumerate(counts):
            self._missing[slot] -= count

    def _next(self) -> list[int]:
        """Tokens of the next chunk by prompt, without those that are complete behind the last that is not."""
        shortest = min(rows for rows in self._missing if rows)
        length = min(self._chunk, -(-shortest // ROUND_TO) * ROUND_TO)
        counts = [min(rows, length) for rows in self._missing]
        return counts[: max(slot for slot, count in enumerate(counts) if count) + 1]


def logits_beside(base: BaseModel, rows_RF: Tensor, prompts: Sequence[Prefill]) -> Tensor:
    """Logits [R, V] of these rows; prompts that are done get theirs from the same product."""
    done = [prompt for prompt in prompts if prompt.done]
    if not done:
        return base.logits(rows_RF)
    rows = [rows_RF, *(prompt.ends for prompt in done)]
    parts = torch.split(base.logits(torch.cat(rows)), [len(part) for part in rows])
    for prompt, logits_BV in zip(done, parts[1:], strict=True):
        prompt.logits = logits_BV
    return parts[0]


@torch.inference_mode()
def advance(base: BaseModel, prompts: Sequence[Prefill]) -> None:
    """One chunk of each, in one pass where the base can."""
    chunks = verify_together(base, [(prompt.cache, prompt.chunk()) for prompt in prompts])
    for prompt, hidden_bCF in zip(prompts, chunks, strict=True):
        prompt.take(hidden_bCF)
    if any(prompt.done for prompt in prompts):
        logits_beside(base, chunks[0].new_empty(0, base.feature_size), prompts)


@torch.inference_mode()
def prefill(
    base: BaseModel,
    cache: SlotCache,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
    chunk: int = CHUNK,
) -> DecodeState:
    """The state of the first step after all of ``Prefill``, without the rows of the roots."""
    job = Prefill(base, cache, prompts, seeds, chunk, roots=False)
    while not job.done:
        (hidden_bCF,) = verify_together(base, [(cache, job.chunk())])
        job.take(hidden_bCF)
    return job.state
