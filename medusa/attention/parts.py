"""A pass in parts of equally large trees, their keys gathered: for whoever computes in rectangles.

Legend: S sequences of a part, N nodes of each, Q of them whose rows are computed, L cached positions of a sequence,
P positions that are gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa.attention.contract import BlockTable, TreePlan


@dataclass(eq=False)
class Part:
    """The sequences of a plan that have trees of one size, with what belongs to them.

    Attributes:
        nodes: N.
        count: Q, those of them whose rows are computed: the last ones.
        rows: [S * Q] int64 which rows of the pass are theirs; None = all of them, in order.
        lengths: [S] int64, L.
        depths: [S, Q] int64.
        ancestors: [S, Q, N] bool: node j is the row's own or an ancestor of it.
        blocks: [S, W] int64 of the table.
        places: [S, P] int64 where each position stands in keys or values [blocks * size, ...]; any place that is
            written where the position is not.
        written: [S, P] bool: the position is a cached one or a node's.
    """

    nodes: int
    count: int
    rows: Tensor | None
    lengths: Tensor
    depths: Tensor
    ancestors: Tensor
    blocks: Tensor
    places: Tensor
    written: Tensor

    @classmethod
    def of(cls, plan: TreePlan, nodes: int, device: torch.device) -> "Part":
        """The trees of that many nodes, for layers on that device."""
        here, rows = plan.lengths.device, None
        lengths, depths, ancestors, blocks = plan.lengths, plan.depths, plan.ancestors, plan.table.blocks
        if plan.uniform is None:
            chosen = [sequence for sequence, size in enumerate(plan.sizes) if size == nodes]
            firsts = torch.tensor([plan.firsts[sequence] for sequence in chosen], device=here)
            sequences = torch.tensor(chosen, device=here)
            rows = (firsts[:, None] + torch.arange(nodes, device=here)).flatten()
            lengths, depths, ancestors, blocks = lengths[sequences], depths[rows], ancestors[rows], blocks[sequences]
        positions_P = torch.arange(plan.kv_length, device=here)
        written = positions_P < lengths[:, None] + nodes
        places = BlockTable(blocks, plan.table.size).places(torch.where(written, positions_P, 0))
        shape = (len(lengths), count := nodes - plan.computed)
        depths, ancestors = depths.view(shape), ancestors[:, :nodes].reshape(*shape, nodes)
        tensors = (lengths, depths, ancestors, blocks, places, written)
        return cls(nodes, count, None if rows is None else rows.to(device), *(tensor.to(device) for tensor in tensors))

    def take(self, rows: Tensor) -> Tensor:
        """[S, Q, ...] of rows [R, ...]."""
        own = rows if self.rows is None else rows[self.rows]
        return own.view(-1, self.count, *rows.shape[1:])

    def gather(self, arena: Tensor) -> Tensor:
        """[S, P, Hkv, D] of keys or values [blocks, size, Hkv, D]; 0 where nothing has been written."""
        return torch.where(self.written[..., None, None], arena.flatten(0, 1)[self.places], 0)

    def gather_own(self, arena: Tensor) -> Tensor:
        """[S, N, Hkv, D] of keys or values: those of the nodes themselves."""
        return arena.flatten(0, 1)[self.own]

    @cached_property
    def own(self) -> Tensor:
        """[S, N] where the nodes' keys stand."""
        return self.places.gather(1, self.node_positions)

    @cached_property
    def node_positions(self) -> Tensor:
        """[S, N] int64: L + i."""
        return self.lengths[:, None] + torch.arange(self.nodes, device=self.lengths.device)

    @cached_property
    def lengths_int32(self) -> Tensor:
        """[S] int32, L."""
        return self.lengths.to(torch.int32)

    @cached_property
    def blocks_int32(self) -> Tensor:
        """[S, W] int32."""
        return self.blocks.to(torch.int32)


def parts(plan: TreePlan, device: torch.device) -> list[Part]:
    """All parts of a plan, for layers on that device."""
    sizes = sorted(set(plan.sizes) - {0})
    return plan.once(("parts", device), lambda: [Part.of(plan, nodes, device) for nodes in sizes])


def by_part(plan: TreePlan, query: Tensor, attend: Callable[[Part, Tensor], Tensor]) -> Tensor:
    """[R, H, Dv] of queries [R, H, D], from what is computed of each part: (part, [S, N, H, D]) -> [S, N, H, Dv]."""
    done = [(part.rows, attend(part, part.take(query)).flatten(0, 1)) for part in parts(plan, query.device)]
    rows, out = done[0]
    if rows is None:
        return out
    whole = out.new_empty(plan.rows, *out.shape[1:])
    for rows, out in done:
        whole[rows] = out
    return whole
