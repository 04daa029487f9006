"""Medusa-2: whole rows go through the adapted base, because its hidden states change in every step.

Shapes: B rows of a pass, K heads, C = 1 + K columns: the base, then the heads.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.data.packing import IGNORE, PackedRows
from medusa.formats.native import ADAPTER
from medusa.heads import DraftHeads
from medusa.train.adapters import Adapters
from medusa.train.config import Recipe
from medusa.train.features import Positions
from medusa.train.joint import JointLoss
from medusa.train.schedule import mixed_seed, rows_of_step
from medusa.train.workers import Workers


class Medusa2:
    """Heads and adapters, with the interface of `Medusa1`; the second group of parameters are the adapters."""

    def __init__(
        self, recipe: Recipe, base: BaseModel, heads: DraftHeads, packed: PackedRows, workers: Workers, total: int
    ) -> None:
        lora, optim = recipe.lora, recipe.optim
        self._adapters = Adapters(base, lora)
        self.module = JointLoss(heads, base, self._adapters, lora.base_loss, optim.loss, recipe.engine.loss_rows)
        self.groups = [list(heads.parameters()), list(self._adapters.parameters().values())]
        self._recipe, self._packed, self._workers, self._device = recipe, packed, workers, base.device
        self._whole = heads.remembers

    def prepare(self) -> None:
        """Nothing to prepare."""

    def label_counts(self, step: int) -> Tensor:
        """Labels of the base and of heads 1..K in a step, over all processes, int64 [1 + K]."""
        return (self._packed.targets(self._rows(step), self._recipe.heads.num_heads) != IGNORE).sum((0, 1))

    def micro_batches(self, step: int, weights_C: Tensor) -> Iterator[tuple[tuple[Any, ...], bool]]:
        """Whole rows, `micro_rows` at a time; dropout depends on the step and the rows that go together."""
        optim, workers = self._recipe.optim, self._workers
        rows = self._rows(step)
        places = torch.arange(len(rows)).tensor_split(workers.world_size)
        count = -(-len(places[0]) // optim.micro_rows)  # the first share is the largest
        mine = places[workers.rank]
        for number, part in enumerate(mine.tensor_split(count), start=1):
            torch.manual_seed(mixed_seed(mixed_seed(optim.seed, step), int(part[0]) if len(part) else 0))
            inputs = self._inputs(rows[part]) if len(part) else self._nothing(rows[mine[:1]])
            yield (*(tensor.to(self._device) for tensor in inputs), weights_C), number == count

    def flush(self) -> None:
        """Nothing to write."""

    def save_adapter(self, directory: Path) -> str:
        """Write the adapters into the heads' directory; returns their directory's name."""
        self._adapters.save(directory / ADAPTER)
        return str(directory / ADAPTER)

    def _rows(self, step: int) -> Tensor:
        optim = self._recipe.optim
        return rows_of_step(optim.seed, step, optim.rows_per_step, len(self._packed))

    def _inputs(self, rows_B: Tensor) -> tuple[Tensor, ...]:
        packed, kept = self._packed, Positions.of(self._packed, rows_B, self._recipe.heads.num_heads, self._whole)
        return packed.input_ids[rows_B].long(), packed.position_ids[rows_B].long(), kept.kept, kept.path, kept.targets

    def _nothing(self, row_1: Tensor) -> tuple[Tensor, ...]:
        """An input without kept positions, for a process that has fewer rows than another."""
        ids_BT, places_BT, kept_BT, path_MK, targets_MC = self._inputs(row_1)
        return ids_BT, places_BT, torch.zeros_like(kept_BT), path_MK[:0], targets_MC[:0]
