"""Training steps made of blocks of rows, with the positions of many documents mixed.

The positions of one row are alike, because they come from about a dozen documents. A step with positions from many rows
has a less noisy gradient. So the rows of several steps form a block, and a permutation divides the block's positions
among its steps. The base still reads each row once. All of this is a function of the seed and the step, and the same
for any number of processes: each process takes a share of the block's rows, and in a step the positions of those rows.

Heads that remember read whole documents in each step of a block, and guess at the step's positions only.

Shapes: M positions, U positions whose hidden states are teachers, K heads, D hidden size, F width of the base's hidden
states (D, or a multiple of it with feature layers).
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.data.packing import IGNORE, PackedRows
from medusa.train.config import OptimRecipe
from medusa.train.features import Gathered, HiddenStates, Positions
from medusa.train.schedule import mixed_seed, rows_of_step


class MicroBatch(NamedTuple):
    """Positions that go through the heads together; there may be none."""

    hidden: Tensor
    """float32 [M, F]; hidden states of the base at positions t."""
    path: Tensor
    """int64 [M, K]; tokens t+1 .. t+K."""
    labels: Tensor
    """int64 [M, K]; tokens t+2 .. t+1+K, `IGNORE` where a head has no target."""
    teacher: Tensor | None = None
    """float32 [U, D]; last hidden states whose distributions are the targets; None if the labels are (ce)."""
    teacher_index: Tensor | None = None
    """int64 [M, K]; the row of `teacher` for each label that is not `IGNORE`."""
    places: Tensor | None = None
    """int64 [M]; t, counted from the beginning of the document."""


class Block:
    """The rows of successive steps, as one of `world_size` processes sees them.

    Args:
        optim: the seed, rows per step and the kind of loss.
        packed: all rows.
        num_heads: K.
        first: the first step.
        steps: number of steps of the block.
        rank: rank of this process.
        world_size: number of processes.
        hidden_size: D; None = F, without feature layers.
        whole: keep documents whole, for heads that remember.
    """

    def __init__(
        self, optim: OptimRecipe, packed: PackedRows, num_heads: int, first: int, steps: int, rank: int,
        world_size: int, hidden_size: int | None = None, whole: bool = False,
    ) -> None:  # fmt: skip
        self.first, self._rank, self._soft, self._hidden_size = first, rank, optim.loss != "ce", hidden_size
        chain = [rows_of_step(optim.seed, first + step, optim.rows_per_step, len(packed)) for step in range(steps)]
        rows = torch.cat(chain)
        self.positions, self._whole = Positions.of(packed, rows, num_heads, whole), whole
        self._steps_M = _deal(len(self.positions.targets), steps, mixed_seed(optim.seed, first))
        shares = rows.tensor_split(world_size)
        self.rows, self._most_rows = shares[rank], len(shares[0])
        ends = self.positions.per_row.cumsum(0)
        # Positions of the rows of each process: [bounds[rank], bounds[rank + 1]).
        bounds = torch.tensor([len(share) for share in shares]).cumsum(0)
        self._bounds = [0, *(int(ends[bound - 1]) if bound else 0 for bound in bounds)]
        self._hidden_MF: Gathered | None = None

    def label_counts(self, step: int) -> Tensor:
        """Labels of the base and of heads 1..K in a step, over all processes, int64 [1 + K]."""
        return (self.positions.targets[self._steps_M == step - self.first] != IGNORE).sum(0)

    def micro_batches(self, step: int, states: HiddenStates, size: int) -> Iterator[tuple[MicroBatch, bool]]:
        """This process's micro-batches of a step (`size` positions, or rows if `whole`), and whether each is the last.

        All processes get the same number of micro-batches, at least one, so those with fewer positions get empty ones.
        """
        if self._hidden_MF is None:
            self._hidden_MF = states.read(self.rows)
        start, pieces = self._bounds[self._rank], self._rows_of(size) if self._whole else self._dealt(step, size)
        for number, piece in enumerate(pieces, start=1):
            yield self._micro_batch(piece, start, step), number == len(pieces)

    def _dealt(self, step: int, size: int) -> list[Tensor]:
        """This process's positions of a step, as indices among its positions of the block, in micro-batches."""
        start, end = self._bounds[self._rank : self._rank + 2]
        mine = (self._steps_M[start:end] == step - self.first).nonzero().squeeze(1)
        most = max(int((self._steps_M[a:b] == step - self.first).sum()) for a, b in pairwise(self._bounds))
        return [mine[number * size : (number + 1) * size] for number in range(max(1, -(-most // size)))]

    def _rows_of(self, count: int) -> list[Tensor]:
        """The same as `_dealt` for whole documents: all positions of `count` rows at a time."""
        start, end = self._bounds[self._rank : self._rank + 2]
        ends = self.positions.per_row.cumsum(0) - start
        rows = [0, *ends[(ends > 0) & (ends <= end - start)].tolist()]
        firsts = [rows[min(row, len(rows) - 1)] for row in range(0, self._most_rows + count, count)]
        return [torch.arange(first, last) for first, last in pairwise(firsts)]

    def _micro_batch(self, index_M: Tensor, start: int, step: int) -> MicroBatch:
        assert self._hidden_MF is not None
        device, positions = self._hidden_MF.device, self.positions
        others_M1 = self._steps_M[start + index_M, None] != step - self.first  # in whole documents
        batch = (
            self._hidden_MF[index_M, :].float(),
            positions.path[start + index_M].to(device),
            positions.targets[start + index_M, 1:].masked_fill(others_M1, IGNORE).to(device),
        )
        places_M = positions.places[start + index_M].to(device)
        if not self._soft:
            return MicroBatch(*batch, places=places_M)
        num_heads = positions.path.shape[1]
        ahead_MK = index_M[:, None] + torch.arange(1, num_heads + 1)
        teachers, teacher_MK = ahead_MK.clamp(max=len(self._hidden_MF) - 1).unique(return_inverse=True)
        teacher_UD = self._hidden_MF[teachers, : self._hidden_size].float()
        return MicroBatch(*batch, teacher_UD, teacher_MK.to(device), places_M)


def _deal(count: int, steps: int, seed: int) -> Tensor:
    """The step within the block of each of `count` positions, int64 [count]: equal numbers, in random order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    dealt = torch.empty_like(order)
    dealt[order] = torch.arange(count) * steps // max(1, count)
    return dealt
