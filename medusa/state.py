"""The state between decode steps."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class DecodeState:
    """The state from which a decode step starts.

    Attributes:
        roots: [B] int64, the newest committed token of each sequence; its keys and values are not cached yet.
        hidden: [B, F], the base's hidden state at the token before the root (the one that predicted it).
        active: [B] bool, false for sequences that are finished and must not grow.
        history: [B, T] int64, all tokens of each active sequence up to its root; undefined after it. Every step writes
            its new tokens into this buffer, which grows with the cache.
        positions: [B] int64, position of the root in the history.
        seeds: [B] int64, seed of all noise of a sequence.
        starts: [B] int64, position in the history where the completion begins: the length of the prompt.
    """

    roots: Tensor
    hidden: Tensor
    active: Tensor
    history: Tensor
    positions: Tensor
    seeds: Tensor
    starts: Tensor

    def select(self, rows: Sequence[int] | Tensor) -> "DecodeState":
        """The state of these sequences only, in this order."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.roots.device)
        return DecodeState(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def join(self, other: "DecodeState") -> "DecodeState":
        """The sequences of both states, the other's after ours."""
        width = max(self.history.shape[1], other.history.shape[1])
        histories = [pad(state.history, (0, width - state.history.shape[1])) for state in (self, other)]
        parts = {
            field.name: torch.cat([getattr(self, field.name), getattr(other, field.name)])
            for field in fields(self)
            if field.name != "history"
        }
        return DecodeState(**parts, history=torch.cat(histories))
