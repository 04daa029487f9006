"""What the heads learn from: positions of packed rows, and the base's hidden states at them.

A position t is kept where the base or a head has a target: where one of the tokens t+1 .. t+1+K of the same document
is in the loss mask. Kept positions of one answer follow each other, so what the base says at t+k stands k places on.

Shapes: B rows, T tokens, M kept positions in the order of rows, K heads, F width of the base's hidden states (its
hidden size, times more with feature layers).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from data.packing import IGNORE, PackedRows
from medusa.base.model import BaseModel


@dataclass(frozen=True)
class Positions:
    """Kept positions of some rows."""

    targets: Tensor
    """int64 [M, 1 + K]; column k is token t+1+k, or `IGNORE`."""
    path: Tensor
    """int64 [M, K]; the tokens t+1 .. t+K, which heads may read."""
    kept: Tensor
    """bool [B, T]; where the M positions are."""

    @staticmethod
    def of(packed: PackedRows, rows_B: Tensor, num_heads: int) -> "Positions":
        """The kept positions of rows."""
        targets = packed.targets(rows_B, num_heads)
        kept_BT = (targets != IGNORE).any(2)
        ids_BT = packed.input_ids[rows_B].long()
        # What a head with a target reads is in the same document: a row's end never wraps into its view.
        path_BTK = torch.stack([ids_BT.roll(-ahead, dims=1) for ahead in range(1, num_heads + 1)], dim=2)
        return Positions(targets[kept_BT], path_BTK[kept_BT], kept_BT)

    @property
    def per_row(self) -> Tensor:
        """int64 [B]; kept positions of each row."""
        return self.kept.sum(1)


class HiddenStates(Protocol):
    """Where hidden states come from: a pass of the base, or a disk."""

    def read(self, rows_B: Tensor) -> Tensor:
        """Hidden states [M, F] of the base at the kept positions of rows, see `BaseModel.hidden_states`."""

    def flush(self) -> None:
        """Write what is still in memory only."""


class BasePass:
    """The base itself, a few rows at a time.

    Args:
        base: the frozen model.
        packed: the rows.
        num_heads: K.
        micro_rows: rows per pass.
    """

    def __init__(self, base: BaseModel, packed: PackedRows, num_heads: int, micro_rows: int) -> None:
        self._base, self._packed, self._num_heads, self._micro_rows = base, packed, num_heads, micro_rows

    @torch.no_grad()
    def read(self, rows_B: Tensor) -> Tensor:
        """Hidden states [M, F] in the base's dtype on its device."""
        base, packed = self._base, self._packed
        kept = []
        for micro in rows_B.split(self._micro_rows):
            kept_BT = packed.kept(micro, self._num_heads)
            ids_BT, positions_BT = packed.input_ids[micro].long(), packed.position_ids[micro].long()
            hidden_BTF = base.hidden_states(ids_BT.to(base.device), positions_BT.to(base.device))
            kept.append(hidden_BTF[kept_BT.to(base.device)])
        return torch.cat(kept)

    def passes(self, rows_B: Tensor) -> int:
        """How many passes of the base `read` makes."""
        return sum(self._base.passes(self._packed.position_ids[micro]) for micro in rows_B.split(self._micro_rows))

    @torch.no_grad()
    def idle(self) -> None:
        """One pass of the base for nothing."""
        self._base.hidden_states(torch.zeros(1, 1, dtype=torch.int64, device=self._base.device))

    def flush(self) -> None:
        """Nothing is in memory only."""


class EvenPasses:
    """Hidden states from a sharded base: processes with fewer passes go along with some that are thrown away.

    Args:
        base: makes the passes.
        device: where this process computes.
    """

    def __init__(self, base: BasePass, device: torch.device) -> None:
        self._base, self._device = base, device

    def read(self, rows_B: Tensor) -> Tensor:
        """Hidden states [M, F] of the kept positions of rows; all processes call it, with one row at least."""
        mine = self._base.passes(rows_B)
        most = torch.tensor(mine, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        hidden_MF = self._base.read(rows_B)
        for _ in range(int(most) - mine):
            self._base.idle()
        return hidden_MF

    def flush(self) -> None:
        """Nothing is in memory only."""
