"""Prompts are computed before they are continued: in chunks, so that others can decode between two of them."""

from collections.abc import Sequence

import torch

from medusa.base.model import BaseModel
from medusa.base.verify import verify
from medusa.cache import SlotCache
from medusa.state import DecodeState, latest
from medusa.tree import Draft

CHUNK = 512
"""Tokens of a prompt that one pass of a prefill computes, at most."""
ROUND_TO = 16
"""Prompts that end within so many tokens of each other end in one pass."""


class Prefill:
    """Caches all of each prompt but its last token, which becomes the first root.

    Args:
        base: The frozen base.
        cache: A cache of B slots: empty, or with the rows of the first tokens of each prompt; at least its last two
            tokens must be missing, since the pass over the last but one gives the state's hidden state.
        prompts: Token ids of B prompts, at least one each; the longest first, where there is a choice: then no pass
            computes more than ``ROUND_TO`` rows of padding per prompt.
        seeds: One per prompt, None = 0.
        chunk: Tokens of a prompt per forward pass, at most; bounds the memory of long prompts. A base that decodes
            plainly gets one at a time.
    """

    def __init__(
        self,
        base: BaseModel,
        cache: SlotCache,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self.cache, self._base, self._chunk = cache, base, 1 if base.decoding == "plain" else chunk
        batch, width = len(prompts), max(map(len, prompts))
        padded = [[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts]
        self._history_BT = torch.tensor(padded, device=base.device)
        self._hidden_BF = torch.zeros(batch, base.feature_size, dtype=base.dtype, device=base.device)
        self._seeds_B = torch.tensor(seeds or [0] * batch, device=base.device)
        self._missing = [len(prompt) - 1 - length for prompt, length in zip(prompts, cache.host_lengths, strict=True)]

    @torch.inference_mode()
    def advance(self) -> DecodeState | None:
        """Compute one chunk of each prompt.

        Returns:
            The state of the first step once nothing is missing; the hidden state of a prompt of one token is zero.
        """
        if any(self._missing):
            self._compute()
        if any(self._missing):
            return None
        lengths_B = self.cache.lengths
        roots_B = self._history_BT.gather(1, lengths_B[:, None])[:, 0]
        active_B = torch.ones_like(roots_B, dtype=torch.bool)
        return DecodeState(
            roots_B, self._hidden_BF, active_B, self._history_BT, lengths_B, self._seeds_B, starts=lengths_B + 1
        )

    def _compute(self) -> None:
        """One pass as far as the shortest prompt reaches that is not complete, without those that are behind it."""
        cache, device, width = self.cache, self._base.device, self._history_BT.shape[1]
        shortest = min(rows for rows in self._missing if rows)
        length = min(self._chunk, -(-shortest // ROUND_TO) * ROUND_TO)
        counts = [min(rows, length) for rows in self._missing]
        slots = max(slot for slot, count in enumerate(counts) if count) + 1
        counts = counts[:slots]
        cache.reserve(cache.longest + max(counts))
        counts_b, index_C = torch.tensor(counts, device=device), torch.arange(max(counts), device=device)
        with cache.leading(slots):
            places_bC = (cache.lengths[:, None] + index_C).clamp(max=width - 1)
            hidden_bCF = verify(self._base, cache, Draft.chain(self._history_BT[:slots].gather(1, places_bC)))
            cache.extend(counts_b)
            cache.grow(counts)
        for follower in cache.observers:
            next_bC = self._history_BT[:slots].gather(1, (places_bC + 1).clamp(max=width - 1))
            follower.observe(hidden_bCF, next_bC, counts)
        self._hidden_BF[:slots] = latest(hidden_bCF, counts_b, self._hidden_BF[:slots])
        for slot, count in enumerate(counts):
            self._missing[slot] -= count


def prefill(
    base: BaseModel,
    cache: SlotCache,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
    chunk: int = CHUNK,
) -> DecodeState:
    """The state of the first step after all of ``Prefill``."""
    job = Prefill(base, cache, prompts, seeds, chunk)
    while (state := job.advance()) is None:
        pass
    return state
