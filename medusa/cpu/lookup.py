"""Trees of what stood in a text before as one C++ call (kernels/lookup.h)."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.cpu.native import kernels
from medusa.tree import Draft, ragged

_INT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Search(NamedTuple):
    """What counts, and how much is drafted.

    Attributes:
        nodes: N, the root included.
        chain: A node has one child, the likeliest.
        places: Of a text that count, the best ones.
        longest: Tokens of a match that count.
        shares: Parts that shares are told apart by.
        floor: Nodes are left out below this log-probability.
        edge_cost: Is taken off every log-probability.
        keep: What is left of a judgement when the next one of its kind comes.
    """

    nodes: int
    chain: bool
    places: int
    longest: int
    shares: int
    floor: float
    edge_cost: float
    keep: float

    @property
    def kinds(self) -> tuple[int, int]:
        """Of guesses: by the tokens that agree before them, and by their share of what followed there."""
        return self.longest + 1, self.shares + 1


class _Looking(ctypes.Structure):
    """``Looking`` of lookup.h."""

    _fields_ = [
        *[(name, _INT) for name in ("batch", "stride", "nodes", "chain", "places", "longest", "shares")],
        *[(name, _DOUBLE) for name in ("floor", "edge_cost", "keep")],
        *[(name, _POINTER) for name in ("history", "positions", "before", "active", "right", "tried")],
        *[(name, _POINTER) for name in ("tokens", "parents", "scores", "sizes", "depth")],
    ]


def look_up(
    history: Tensor,
    positions: Tensor,
    before: Tensor | None,
    active: Tensor,
    right: Tensor,
    tried: Tensor,
    search: Search,
) -> Draft:
    """Trees below the roots of these texts, see ``medusa.drafters.continuations``.

    Args:
        history: int64 [B, T].
        positions: int64 [B] of the roots.
        before: int64 [B] of the roots of the draft that is judged first; None = none is.
        active: bool [B].
        right: float64 ``search.kinds``, guesses of each kind that were right, and is brought forward.
        tried: The same of all guesses.
        search: What counts.
    """
    assert history.stride(1) == 1, "the tokens of a text stand side by side"
    batch, positions, active = len(history), positions.contiguous(), active.contiguous()
    before = None if before is None else before.contiguous()
    trees, scores = history.new_empty(2, batch, search.nodes), torch.empty(batch, search.nodes)
    sizes, depth = (_INT * batch)(), _INT()
    looking = _Looking(
        batch, history.stride(0), *search, history.data_ptr(), positions.data_ptr(),
        None if before is None else before.data_ptr(), active.data_ptr(), right.data_ptr(), tried.data_ptr(),
        trees.data_ptr(), trees[1].data_ptr(), scores.data_ptr(), ctypes.addressof(sizes), ctypes.addressof(depth),
    )  # fmt: skip
    kernels().medusa_lookup(ctypes.byref(looking))
    (tokens, parents), kept = trees, list(sizes)
    most = max(kept)
    if most == 1:
        return Draft.chain(tokens[:, :1])
    return Draft(tokens[:, :most], parents[:, :most], depth.value, sizes=ragged(kept), scores=scores[:, :most])
