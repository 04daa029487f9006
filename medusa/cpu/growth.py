"""Growth of trees from the heads' logits in C++ (kernels/grow.h); the result is that of ``HeadsDrafter`` in Python."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.cpu import native

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Growth(NamedTuple):
    """The parameters of growth.

    Attributes:
        levels: Most heads that are used.
        width: Most children of a node.
        nodes: N, number of nodes including the root.
        beam: Most nodes of a level that get children.
        level_floor: A level is drafted if a node above it has this log-probability.
        node_floor: A node is kept if it has more than this log-probability.
        lowest: Bound on a log-probability.
        edge_cost: Subtracted from every log-probability.
        picks: For a static tree: the candidates that get children, for each level but the last.
        columns: For a static tree: [N] indices of its nodes among all candidates.
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
        """Number of nodes of each level that get children; the first level is the root."""
        each = [1]
        for level in range(self.levels - 1):
            each.append(len(self.picks[level]) if self.columns is not None else min(self.beam, each[-1] * self.width))
        return each


class Grown(NamedTuple):
    """The grown trees: tokens, parents and scores [B, N], number of nodes of each tree, and the largest depth."""

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
        """The struct of a growth for the kernels; the growth must outlive it."""
        struct = cls(*growth[: growth._fields.index("picks")])
        if growth.columns is not None:
            struct.of_picks = (_POINTER * len(growth.picks))(*(picks.data_ptr() for picks in growth.picks))
            struct.numbers = (_INT * len(growth.picks))(*map(len, growth.picks))
            struct.picks, struct.picked = ctypes.addressof(struct.of_picks), ctypes.addressof(struct.numbers)
            struct.chosen = growth.columns.data_ptr()
        return struct


class GrownStruct(ctypes.Structure):
    """``Grown`` of grow.h: memory for drafts."""

    _fields_ = [(name, _POINTER) for name in ("tokens", "parents", "scores", "sizes", "depth")]

    @classmethod
    def room(cls, batch: int, nodes: int) -> "GrownStruct":
        """Memory for ``batch`` drafts of ``nodes`` nodes."""
        tokens, parents = torch.empty(2, batch, nodes, dtype=torch.int64)
        scores, sizes, depth = torch.empty(batch, nodes, dtype=torch.float32), (_INT * batch)(), _INT()
        struct = cls(
            tokens.data_ptr(), parents.data_ptr(), scores.data_ptr(), ctypes.addressof(sizes), ctypes.addressof(depth)
        )
        struct.there = tokens, parents, scores, sizes, depth
        return struct

    def read(self) -> Grown:
        """The drafts that the kernel has written."""
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
        growth: The parameters of growth.
        columns: V, number of columns of the logits.
        ids: int64 [V] tokens of the columns; None = the column indices.
    """

    def __init__(self, growth: Growth, columns: int, ids: Tensor | None) -> None:
        self.growth, self.columns, self.ids = growth, columns, ids
        self.struct = GrowthStruct.of(growth)

    def plant(self, roots_B: Tensor, active_B: Tensor) -> "NativeTrees":
        """New trees with only these roots; trees of inactive sequences do not affect how far others grow."""
        return NativeTrees(self, roots_B, active_B)


class NativeTrees:
    """Trees that are growing.

    Attributes:
        frontier: int64 [B, m] tokens of the nodes that get children next.
        slots: int64 [B, m] index of their parents in the previous ``frontier``.
    """

    def __init__(self, how: NativeGrowth, roots_B: Tensor, active_B: Tensor) -> None:
        growth, batch = how.growth, len(roots_B)
        self._how, self._each, self._grown = how, growth.parents, 0
        most, candidates = max(self._each), 1 + sum(self._each) * growth.width
        self._numbers = roots_B.new_empty(2 * batch * (candidates + most))
        self._scores = torch.empty(batch * candidates, dtype=torch.float32)
        self._room = GrownStruct.room(batch, growth.nodes)
        self.frontier, self.slots = roots_B[:, None], torch.zeros_like(roots_B)[:, None]
        self._at = _Growing(
            how.struct, torch.get_num_threads(), batch, how.columns, None if how.ids is None else how.ids.data_ptr(),
            self._numbers.data_ptr(), self._scores.data_ptr(), grown=self._room,
        )  # fmt: skip
        roots, active = roots_B.contiguous(), active_B.contiguous()
        native.kernels().medusa_plant(ctypes.byref(self._at), roots.data_ptr(), active.data_ptr())

    def grow(self, logits_BmV: Tensor) -> bool:
        """Grow one more level; returns whether another level is worth its time.

        The logits are [B, 1, V] if all nodes have the same children.
        """
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
        """The draft of the best nodes."""
        native.kernels().medusa_choose(ctypes.byref(self._at), self._grown)
        return self._room.read()
