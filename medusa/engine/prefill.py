"""Prompts are computed before they are continued: in chunks, so that others can decode between two of them."""

from collections.abc import Sequence

import torch

from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.engine.step import verify
from medusa.state import DecodeState
from medusa.tree import Draft

CHUNK = 512
"""Tokens of a prompt that one pass of a prefill computes."""


class Prefill:
    """Caches all of each prompt but its last token, which becomes the first root.

    Args:
        base: The frozen base.
        cache: A cache of B slots: empty, or with the rows of the first tokens of each prompt; at least its last two
            tokens must be missing, since the pass over the last but one gives the state's hidden state.
        prompts: Token ids of B prompts, at least one each.
        seeds: One per prompt, None = 0.
        chunk: Rows per forward pass; bounds the memory of long prompts. A base that decodes plainly gets one at a time.
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
            self._compute([min(rows, self._chunk) for rows in self._missing])
        if any(self._missing):
            return None
        lengths_B = self.cache.lengths
        roots_B = self._history_BT.gather(1, lengths_B[:, None])[:, 0]
        active_B = torch.ones_like(roots_B, dtype=torch.bool)
        return DecodeState(
            roots_B, self._hidden_BF, active_B, self._history_BT, lengths_B, self._seeds_B, starts=lengths_B + 1
        )

    def _compute(self, counts: list[int]) -> None:
        cache, device, width = self.cache, self._base.device, self._history_BT.shape[1]
        counts_B, index_C = torch.tensor(counts, device=device), torch.arange(max(counts), device=device)
        tokens_BC = self._history_BT.gather(1, (cache.lengths[:, None] + index_C).clamp(max=width - 1))
        hidden_BCF = verify(self._base, cache, Draft.chain(tokens_BC))
        last_BF = hidden_BCF[torch.arange(len(counts), device=device), (counts_B - 1).clamp(min=0)]
        self._hidden_BF = torch.where(counts_B[:, None] > 0, last_BF, self._hidden_BF)
        cache.extend(counts_B)
        cache.grow(counts)
        self._missing = [rows - count for rows, count in zip(self._missing, counts, strict=True)]


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
