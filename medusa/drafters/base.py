"""The drafter's contract, and the drafter that drafts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from medusa.tree import Draft


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


class Drafter(Protocol):
    """Proposes trees; what it proposes can change speed, never the text of ``greedy`` and ``sampling`` acceptance.

    The ``speculative`` rule keeps the distribution of the text as long as ``Draft.probs`` says how tokens were drawn.
    """

    nodes: int
    """N, nodes of a draft with the root; on a CPU, where shapes cost nothing, a draft may have fewer."""
    recordable: bool
    """Shapes are fixed and drafts follow from the state's tensors alone, on the device: a step may become a CUDA graph.
    A drafter of your own may leave it out, see ``is_recordable``."""

    def propose(self, state: DecodeState) -> Draft:
        """A draft whose column 0 holds ``state.roots``."""


def is_recordable(drafter: Drafter) -> bool:
    """Whether the drafter says that it is recordable."""
    return bool(getattr(drafter, "recordable", False))


class PlainDrafter:
    """Drafts nothing: every step is one plain decode step."""

    nodes = 1
    recordable = True

    def propose(self, state: DecodeState) -> Draft:
        """The roots alone."""
        return Draft.chain(state.roots[:, None])
