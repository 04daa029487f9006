"""Trees that grow from the heads' logits in C++ (kernels/grow.h), as ``HeadsDrafter`` grows them in Python."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.cpu import native

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Growth(NamedTuple):
    """How trees grow.

    Attributes:
        levels: Heads that are asked, at most.
        width: Children that a node can have.
        nodes: N, the root included.
        beam: Nodes of a level that get children, at most.
        level_floor: A level is drafted if a node above it has this log-probability.
        node_floor: A node is kept if it has more than this log-probability.
        lowest: Bound on a log-probability.
        edge_cost: Is taken off every log-probability.
        picks: Of a static tree: candidates of each level but the last that get children.
        columns: Of a static tree: [N] which of all candidates are its nodes.
    """

    levels: int
    width: int
    nodes: int
    beam: int
    level_floor: float
    node_floor: float
    lowest: float
    edge_cost: float
    picks: Sequence[Tensor] = ()
    columns: Tensor | None = None

    @property
    def parents(self) -> list[int]:
        """Nodes of each level that get children; the first is the root's."""
        each = [1]
        for level in range(self.levels - 1):
            each.append(len(self.picks[level]) if self.columns is not None else min(self.beam, each[-1] * self.width))
        return each


class Grown(NamedTuple):
    """What has grown: tokens, parents and scores [B, N], nodes of each tree, and their largest depth."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    sizes: list[int]
    depth: int


class GrowthStruct(ctypes.Structure):
    """``Growth`` of grow.h."""

    _fields_ = [
        *[(name, _INT) for name in ("levels", "width", "nodes", "beam")],
        *[(name, _FLOAT) for name in ("level_floor", "node_floor", "lowest", "edge_cost")],
        *[(name, _POINTER) for name in ("picks", "picked", "chosen")],
    ]  # fmt: skip

    @classmethod
    def of(cls, growth: Growth) -> "GrowthStruct":
        """The same for the kernels; the growth must outlive it."""
        struct = cls(*growth[: growth._fields.index("picks")])
        if growth.columns is not None:
            struct.of_picks = (_POINTER * len(growth.picks))(*(picks.data_ptr() for picks in growth.picks))
            struct.numbers = (_INT * len(growth.picks))(*map(len, growth.picks))
            struct.picks, struct.picked = ctypes.addressof(struct.of_picks), ctypes.addressof(struct.numbers)
            struct.chosen = growth.columns.data_ptr()
        return struct


class GrownStruct(ctypes.Structure):
    """``Grown`` of grow.h: room for drafts."""

    _fields_ = [(name, _POINTER) for name in ("tokens", "parents", "scores", "sizes", "depth")]

    @classmethod
    def room(cls, batch: int, nodes: int) -> "GrownStruct":
        """For so many of so many nodes."""
        tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64)
        scores, sizes, depth = torch.empty(batch, nodes), (_INT * batch)(), _INT()
        struct = cls(
            tokens.data_ptr(), parents.data_ptr(), scores.data_ptr(), ctypes.addressof(sizes), ctypes.addressof(depth)
        )
        struct.there = tokens, parents, scores, sizes, depth
        return struct

    def read(self) -> Grown:
        """What the kernel has left there."""
        tokens, parents, scores, sizes, depth = self.there
        largest = max(sizes)
        return Grown(tokens[:, :largest], parents[:, :largest], scores[:, :largest], list(sizes), depth.value)


class _Growing(ctypes.Structure):
    """``Growing`` of grow.h."""

    _fields_ = [
        ("growth", GrowthStruct),
        *[(name, _INT) for name in ("threads", "batch", "columns")],
        *[(name, _POINTER) for name in ("ids", "numbers", "scores", "tokens", "above")],
        ("grown", GrownStruct),
    ]  # fmt: skip


class NativeGrowth:
    """Grows trees level by level from logits that the heads' modules compute.

    Args:
        growth: How.
        columns: V, of logits.
        ids: int64 [V] their tokens; None = the columns themselves.
    """

    def __init__(self, growth: Growth, columns: int, ids: Tensor | None) -> None:
        self.growth, self.columns, self.ids = growth, columns, ids
        self.struct = GrowthStruct.of(growth)

    def plant(self, roots_B: Tensor, active_B: Tensor) -> "NativeTrees":
        """Trees of these roots alone; those of sequences that are not active have no say in how far others grow."""
        return NativeTrees(self, roots_B, active_B)


class NativeTrees:
    """Trees under way.

    Attributes:
        frontier: int64 [B, m] tokens of the nodes that get children next.
        slots: int64 [B, m] where their parents stood among such nodes of the level before.
    """

    def __init__(self, how: NativeGrowth, roots_B: Tensor, active_B: Tensor) -> None:
        growth, batch = how.growth, len(roots_B)
        self._how, self._each, self._grown = how, growth.parents, 0
        most, candidates = max(self._each), 1 + sum(self._each) * growth.width
        self._numbers = roots_B.new_empty(2 * batch * (candidates + most))
        self._scores, self._room = torch.empty(batch * candidates), GrownStruct.room(batch, growth.nodes)
        self.frontier, self.slots = roots_B[:, None], torch.zeros_like(roots_B)[:, None]
        self._at = _Growing(
            how.struct, torch.get_num_threads(), batch, how.columns, None if how.ids is None else how.ids.data_ptr(),
            self._numbers.data_ptr(), self._scores.data_ptr(), grown=self._room,
        )  # fmt: skip
        roots, active = roots_B.contiguous(), active_B.contiguous()
        native.kernels().medusa_plant(ctypes.byref(self._at), roots.data_ptr(), active.data_ptr())

    def grow(self, logits_BmV: Tensor) -> bool:
        """A level more, [B, 1, V] where all nodes have the same children; whether another one is worth its time."""
        level, batch, logits = self._grown, len(self.frontier), logits_BmV.contiguous()
        self._grown += 1
        last = self._grown == self._how.growth.levels
        if not last:
            self.frontier, self.slots = self.frontier.new_empty(2, batch, self._each[self._grown])
            self._at.tokens, self._at.above = self.frontier.data_ptr(), self.slots.data_ptr()
        highest = ctypes.c_float()
        native.kernels().medusa_grow(
            ctypes.byref(self._at), native.number_type(logits.dtype), level, logits.shape[1], logits.data_ptr(),
            ctypes.byref(highest),
        )  # fmt: skip
        return not last and highest.value >= self._how.growth.level_floor

    def draft(self) -> Grown:
        """The best of what has grown."""
        native.kernels().medusa_choose(ctypes.byref(self._at), self._grown)
        return self._room.read()
