"""The training data of heads: positions of packed rows, and the base's hidden states there.

Shapes: B rows, T tokens, M kept positions in the order of rows, K heads, F width of the base's hidden states (its
hidden size, or a multiple of it with feature layers).
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from medusa.base.documents import document_lengths, document_rows
from medusa.base.model import BaseModel
from medusa.cache import CachedSequence
from medusa.data.packing import IGNORE, PackedRows
from medusa.engine.replay import compute
from medusa.loading.self_test import fuse


@dataclass(frozen=True)
class Positions:
    """Kept positions of rows: those where the base or a head has a target, or all positions of whole documents.

    A position t is kept if one of the tokens t+1 .. t+1+K of the same document is in the loss mask. The kept positions
    of an answer are consecutive, so the base's hidden state at t+k is k places later. Heads that remember keep whole
    documents.
    """

    targets: Tensor
    """int64 [M, 1 + K]; column k is token t+1+k, or `IGNORE`."""
    path: Tensor
    """int64 [M, K]; the tokens t+1 .. t+K, which heads may read."""
    places: Tensor
    """int64 [M]; t, counted from the beginning of the document."""
    kept: Tensor
    """bool [B, T]; true at the M kept positions."""

    @staticmethod
    def of(packed: PackedRows, rows_B: Tensor, num_heads: int, whole: bool = False) -> "Positions":
        """The kept positions of rows; all positions of `whole` documents."""
        targets = packed.targets(rows_B, num_heads)
        kept_BT = packed.filled(rows_B) if whole else (targets != IGNORE).any(2)
        ids_BT = packed.input_ids[rows_B].long()
        # A head with a target reads tokens of the same document only, so wrapped tokens at a row's end are never read.
        path_BTK = torch.stack([ids_BT.roll(-ahead, dims=1) for ahead in range(1, num_heads + 1)], dim=2)
        places_M = packed.position_ids[rows_B].long()[kept_BT]
        return Positions(targets[kept_BT], path_BTK[kept_BT], places_M, kept_BT)

    @property
    def per_row(self) -> Tensor:
        """int64 [B]; kept positions of each row."""
        return self.kept.sum(1)


class Gathered(Protocol):
    """Hidden states [M, F] that are indexed in parts: a tensor, or files."""

    @property
    def device(self) -> torch.device:
        """The device of the parts."""

    def __len__(self) -> int:
        """M."""

    def __getitem__(self, at: tuple[Tensor, slice], /) -> Tensor:
        """Values [N, f] of the states at positions int64 [N] and a slice of F."""


class HiddenStates(Protocol):
    """A source of hidden states: a pass of the base, or files."""

    def read(self, rows_B: Tensor) -> Gathered:
        """Hidden states [M, F] of the base at the kept positions of rows, see `BaseModel.hidden_states`."""


def for_rows(base: BaseModel) -> BaseModel:
    """The base as rows go through it fastest.

    On a CPU this is the fused pass, 2.5 times as fast as transformers' pass, whose attention computes all pairs of
    positions of a row and masks most of them.
    """
    return fuse(base) if base.device.type == "cpu" else base


class BasePass:
    """Hidden states from passes of the base, a few rows at a time.

    If the base has the fused pass (``for_rows``), each document goes through it, as in decoding.

    Args:
        base: the frozen model.
        packed: the rows.
        num_heads: K.
        micro_rows: rows per pass.
        whole: keep all positions of documents.
        together: the base is divided among the processes, so they make each pass together; a process with fewer rows
            makes additional passes and discards their results.
    """

    def __init__(
        self,
        base: BaseModel,
        packed: PackedRows,
        num_heads: int,
        micro_rows: int,
        whole: bool = False,
        together: bool = False,
    ) -> None:
        self._base, self._packed, self._num_heads = base, packed, num_heads
        self._micro_rows, self._whole, self._together = micro_rows, whole, together

    @torch.no_grad()
    def read(self, rows_B: Tensor) -> Tensor:
        """Hidden states [M, F] in the base's dtype on its device; there is at least one row."""
        base, packed = self._base, self._packed
        idle, kept = self._idle_passes(rows_B), []
        for micro in rows_B.split(self._micro_rows):
            kept_BT = Positions.of(packed, micro, self._num_heads, self._whole).kept
            ids_BT, positions_BT = packed.input_ids[micro].long(), packed.position_ids[micro].long()
            if base.fused:
                kept.append(self._documents(ids_BT, positions_BT)[kept_BT.flatten()])
                continue
            hidden_BTF = base.hidden_states(ids_BT.to(base.device), positions_BT.to(base.device))
            kept.append(hidden_BTF[kept_BT.to(base.device)])
        for _ in range(idle):
            base.hidden_states(torch.zeros(1, 1, dtype=torch.int64, device=base.device))
        return torch.cat(kept)

    def _documents(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Hidden states [B * T, F], document by document."""
        states, pool = [], self._base.new_pool(ids_BT.shape[1])
        for ids_L in ids_BT.flatten().split(document_lengths(positions_BT).tolist()):
            with closing(CachedSequence(pool)) as sequence:
                states.append(compute(self._base, sequence, ids_L))
        return torch.cat(states)

    def _idle_passes(self, rows_B: Tensor) -> int:
        """Number of additional passes, so that all processes make as many."""
        if not self._together:
            return 0
        parts = rows_B.split(self._micro_rows)
        if self._base.traits.separation == "rows":  # several for each part, see `BaseModel.hidden_states`
            mine = sum(len(document_rows(self._packed.position_ids[micro])) for micro in parts)
        else:
            mine = len(parts)
        most = torch.tensor(mine, device=self._base.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most) - mine
