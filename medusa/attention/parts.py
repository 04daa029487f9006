"""Splits a pass into parts with trees of equal size and gathered keys, for backends that need rectangular tensors.

Legend: S sequences of a part, N nodes of each, Q nodes whose rows are computed, L cached positions of a sequence,
P gathered positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa.attention.contract import BlockTable, TreePlan


@dataclass(eq=False)
class Part:
    """The sequences of a plan that have trees of one size, and their data.

    Attributes:
        nodes: N, number of nodes.
        count: Q, number of nodes whose rows are computed; they are the last ones.
        rows: [S * Q] int64 indices of their rows in the pass; None = all rows, in order.
        lengths: [S] int64 cached positions L.
        depths: [S, Q] int64 depths of the rows.
        ancestors: [S, Q, N] bool: whether node j is the row's own or an ancestor.
        blocks: [S, W] int64 blocks of the table.
        places: [S, P] int64 place of each position in keys or values [blocks * size, ...]; any written place if the
            position is not written.
        written: [S, P] bool: whether the position is cached or a node's.
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
        """The trees with this number of nodes, for layers on this device."""
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
        """Select this part [S, Q, ...] of rows [R, ...]."""
        own = rows if self.rows is None else rows[self.rows]
        return own.view(-1, self.count, *rows.shape[1:])

    def gather(self, arena: Tensor) -> Tensor:
        """Gather [S, P, Hkv, D] from keys or values [blocks, size, Hkv, D]; 0 if nothing was written."""
        return torch.where(self.written[..., None, None], arena.flatten(0, 1)[self.places], 0)

    def gather_own(self, arena: Tensor) -> Tensor:
        """Gather [S, N, Hkv, D], the nodes' own keys or values."""
        return arena.flatten(0, 1)[self.own]

    @cached_property
    def own(self) -> Tensor:
        """[S, N] places of the nodes' keys."""
        return self.places.gather(1, self.node_positions)

    @cached_property
    def node_positions(self) -> Tensor:
        """[S, N] int64: L + i for node i."""
        return self.lengths[:, None] + torch.arange(self.nodes, device=self.lengths.device)

    @cached_property
    def lengths_int32(self) -> Tensor:
        """[S] int32 cached positions L."""
        return self.lengths.to(torch.int32)

    @cached_property
    def blocks_int32(self) -> Tensor:
        """[S, W] int32 blocks of the table."""
        return self.blocks.to(torch.int32)


def parts(plan: TreePlan, device: torch.device) -> list[Part]:
    """All parts of a plan, for layers on this device."""
    sizes = sorted(set(plan.sizes) - {0})
    return plan.once(("parts", device), lambda: [Part.of(plan, nodes, device) for nodes in sizes])


def by_part(plan: TreePlan, query: Tensor, attend: Callable[[Part, Tensor], Tensor]) -> Tensor:
    """Compute queries [R, H, D] -> [R, H, Dv], with ``attend`` for each part: (part, [S, N, H, D]) -> [S, N, H, Dv]."""
    done = [(part.rows, attend(part, part.take(query)).flatten(0, 1)) for part in parts(plan, query.device)]
    rows, out = done[0]
    if rows is None:
        return out
    whole = out.new_empty(plan.rows, *out.shape[1:])
    for rows, out in done:
        whole[rows] = out
    return whole
