"""Medusa-1: the base is frozen, so positions of many rows can be mixed and hidden states may come from the disk.

Heads that remember read whole documents in every step.

Shapes: M kept positions, K heads.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.data.packing import PackedRows
from medusa.heads import DraftHeads
from medusa.train.blocks import Block
from medusa.train.config import Recipe
from medusa.train.features import BasePass, HiddenStates, for_rows
from medusa.train.hidden_cache import HiddenCache
from medusa.train.losses import HeadsLoss
from medusa.train.workers import Workers


class Medusa1:
    """The trained module and the inputs of each step, on one process; `Medusa2` has the same interface.

    Args:
        recipe: the recipe.
        base: the base; `Medusa2` adds adapters to it.
        heads: fresh heads.
        packed: training rows.
        workers: this process among all.
        total: steps of the run.

    Attributes:
        module: Its forward pass returns the loss, and per column the summed loss and the count of right answers;
            `heads` are its heads.
        groups: Parameters that share a learning rate; the first group are the heads.
    """

    def __init__(
        self, recipe: Recipe, base: BaseModel, heads: DraftHeads, packed: PackedRows, workers: Workers, total: int
    ) -> None:
        self.module = HeadsLoss(heads, base, recipe.engine.loss_rows, recipe.optim.loss)
        self.groups = [list(heads.parameters())]
        self._recipe, self._packed, self._workers, self._total = recipe, packed, workers, total
        num_heads, whole, cache = recipe.heads.num_heads, heads.remembers, recipe.cache
        shared = recipe.base.shard
        read_by = base if shared else for_rows(base)
        passes = BasePass(read_by, packed, num_heads, recipe.optim.micro_rows, whole, together=shared)
        self._states: HiddenStates = passes
        self._cache: HiddenCache | None = None
        if cache.mode != "online":
            directory = Path(cache.directory or Path(recipe.run) / "hidden")
            self._states = self._cache = HiddenCache(
                directory, base, packed, num_heads, passes, cache.shard_mb * 10**6, whole
            )
        self._hidden_size, self._whole = base.hidden_size, whole
        self._last: Block | None = None

    def prepare(self) -> None:
        """Prepare the first step: fill the cache of hidden states (offline)."""
        if self._cache is not None and self._recipe.cache.mode == "offline":
            workers, rows = self._workers, torch.arange(len(self._packed))
            mine = rows[workers.rank :: workers.world_size]  # all processes lack about as many
            self._cache.fill(mine, self._recipe.optim.micro_rows, shown=workers.rank == 0)
            workers.wait()

    def label_counts(self, step: int) -> Tensor:
        """Labels of the base and of heads 1..K in a step, over all processes, int64 [1 + K]."""
        return self._block(step).label_counts(step)

    def micro_batches(self, step: int, weights_K: Tensor) -> Iterator[tuple[tuple[Any, ...], bool]]:
        """Inputs of the module's forward passes, and whether each is the step's last; as many on every process.

        An input has kept positions for `loss_rows` rows of logits, or `micro_rows` rows of whole documents.
        """
        optim, loss_rows = self._recipe.optim, self._recipe.engine.loss_rows
        size = optim.micro_rows if self._whole else max(1, loss_rows // self._recipe.heads.num_heads)
        for batch, last in self._block(step).micro_batches(step, self._states, size):
            yield (*batch[:3], weights_K, *batch[3:]), last

    def flush(self) -> None:
        """Write pending hidden states; called before a checkpoint."""
        if self._cache is not None:
            self._cache.flush()

    def save_adapter(self, directory: Path) -> str:
        """Write the change of the base into the heads' directory; returns its name, "" = the base is unchanged."""
        return ""

    def _block(self, step: int) -> Block:
        """The block of a step; a new one when the last is used up."""
        optim, workers = self._recipe.optim, self._workers
        mixed = optim.mix_steps or -(-len(self._packed) // optim.rows_per_step)
        first = step - step % mixed
        if self._last is None or self._last.first != first:
            self._last = None  # frees its hidden states before the next block's
            self._last = Block(
                optim, self._packed, self._recipe.heads.num_heads, first, min(mixed, self._total - first),
                workers.rank, workers.world_size, self._hidden_size, self._whole,
            )  # fmt: skip
        return self._last
