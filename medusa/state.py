"""What a decode step starts from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeState:
    """What a step starts from.

    Attributes:
        roots: [B] int64, the newest committed token of each sequence; its keys and values are not cached yet.
        hidden: [B, F], the base's hidden state at the token before the root (the one that predicted it).
        active: [B] bool, false for sequences that are finished and must not grow.
        history: [B, T] int64, all tokens of each active sequence up to its root; what stands behind it is undefined.
            One buffer, which grows with the cache: every step writes its new tokens into it.
        positions: [B] int64, where the root stands in it.
        seeds: [B] int64, what all noise of a sequence is keyed by.
    """

    roots: Tensor
    hidden: Tensor
    active: Tensor
    history: Tensor
    positions: Tensor
    seeds: Tensor

    def select(self, rows: Sequence[int]) -> "DecodeState":
        """The state of these sequences alone, in this order."""
        index = torch.tensor(rows, device=self.roots.device)
        return DecodeState(**{field.name: getattr(self, field.name)[index] for field in fields(self)})
