"""Drafts trees from earlier parts of the same text, or from earlier texts, as one C++ call (kernels/lookup.h)."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.cpu.native import kernels
from medusa.tree import Draft, ragged

_INT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Search(NamedTuple):
    """The parameters of the search and of the draft.

    Attributes:
        nodes: N, number of nodes including the root.
        chain: Each node has one child, the likeliest.
        places: Most places of a text that are used; the best ones.
        longest: Most tokens of a match that count.
        shares: Number of classes of shares.
        floor: Nodes with less than this log-probability are left out.
        edge_cost: Subtracted from every log-probability.
        keep: Factor on earlier counts of a kind of guess when a new one is judged.
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
        """Shape of the kinds of guesses: number of matching tokens before them, and class of their share."""
        return self.longest + 1, self.shares + 1


class EarlierTexts(ctypes.Structure):
    """``Earlier`` of lookup.h: the tables of ``medusa.drafters.ngram.NgramCache``, which holds them."""

    size: int
    buckets: int
    count: int
    _fields_ = [
        *[(name, _INT) for name in ("size", "buckets", "count")],
        *[(name, _POINTER) for name in ("ring", "previous", "latest")],
    ]


class _Looking(ctypes.Structure):
    """``Looking`` of lookup.h."""

    _fields_ = [
        *[(name, _INT) for name in ("batch", "stride", "nodes", "chain", "places", "longest", "shares")],
        *[(name, _DOUBLE) for name in ("floor", "edge_cost", "keep")],
        *[(name, _POINTER) for name in ("history", "positions", "before", "active", "right", "tried")],
        *[(name, _POINTER) for name in ("tokens", "parents", "scores", "sizes", "depth", "earlier")],
    ]


def look_up(
    history: Tensor,
    positions: Tensor,
    before: Tensor | None,
    active: Tensor,
    right: Tensor,
    tried: Tensor,
    search: Search,
    earlier: EarlierTexts | None = None,
) -> Draft:
    """Draft trees below the roots of these texts, see ``medusa.drafters.continuations``.

    Args:
        history: int64 [B, T] tokens of the texts.
        positions: int64 [B] positions of the roots.
        before: int64 [B] positions of the roots of the previous draft, which is judged first; None = no draft.
        active: bool [B], whether a sequence still grows.
        right: float64 of shape ``search.kinds``: number of right guesses of each kind; it is updated.
        tried: The number of all guesses of each kind, in the same form; it is updated.
        search: The parameters.
        earlier: Where to search; None = in the texts themselves.
    """
    assert history.stride(1) == 1, "the tokens of a text stand side by side"
    batch, positions, active = len(history), positions.contiguous(), active.contiguous()
    before = None if before is None else before.contiguous()
    trees, scores = history.new_empty(2, batch, search.nodes), torch.empty(batch, search.nodes, dtype=torch.float32)
    sizes, depth = (_INT * batch)(), _INT()
    looking = _Looking(
        batch, history.stride(0), *search, history.data_ptr(), positions.data_ptr(),
        None if before is None else before.data_ptr(), active.data_ptr(), right.data_ptr(), tried.data_ptr(),
        trees.data_ptr(), trees[1].data_ptr(), scores.data_ptr(), ctypes.addressof(sizes), ctypes.addressof(depth),
        None if earlier is None else ctypes.addressof(earlier),
    )  # fmt: skip
    kernels().medusa_lookup(ctypes.byref(looking))
    (tokens, parents), kept = trees, list(sizes)
    most = max(kept)
    if most == 1:
        return Draft.chain(tokens[:, :1])
    return Draft(tokens[:, :most], parents[:, :most], depth.value, sizes=ragged(kept), scores=scores[:, :most])
