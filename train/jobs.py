"""What a run trains: heads beside a frozen base (Medusa-1), or heads and the base together (Medusa-2).

Shapes: M kept positions, K heads, C columns: the K heads, or 1 + K with the base first where it is trained too.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from data.packing import PackedRows
from medusa.base.model import BaseModel
from medusa.heads import DraftHeads
from train.blocks import Block
from train.config import Recipe
from train.features import BasePass, EvenPasses, HiddenStates
from train.hidden_cache import HiddenCache
from train.losses import HeadsLoss
from train.schedule import head_weights, learning_rate
from train.workers import Workers


class Job(Protocol):
    """A trained module and what each step feeds it, seen from one process."""

    @property
    def module(self) -> nn.Module:
        """Its forward pass returns the loss, summed losses [C] and correct counts [C]; `heads` are its heads."""

    @property
    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """Parameters that share a learning rate."""

    def prepare(self) -> None:
        """Do what must be done before the first step that this process makes."""

    def label_counts(self, step: int) -> Tensor:
        """Labels of the base and of heads 1..K in a step, over all processes, int64 [1 + K]."""

    def weights(self, step: int, counts: Tensor) -> Tensor:
        """Factor of each column's summed loss, float32 [C] on the CPU, from the step's `label_counts`."""

    def rates(self, step: int) -> list[float]:
        """Learning rate of each group; the first is that of the heads."""

    def micro_batches(self, step: int, weights_C: Tensor) -> Iterator[tuple[tuple[Any, ...], bool]]:
        """Inputs of the module's forward passes, and whether they are the step's last; as many on every process."""

    def flush(self) -> None:
        """Write what is in memory only; a checkpoint follows."""

    def save_adapter(self, directory: Path) -> str:
        """Write how the base was changed beside the heads; returns where, or "" if the base is what it was."""


def build_job(
    recipe: Recipe, base: BaseModel, heads: DraftHeads, packed: PackedRows, workers: Workers, total: int, run: Path
) -> Job:
    """The job that the recipe names.

    Args:
        recipe: the recipe.
        base: the base; adapters are added to it where the recipe wants them.
        heads: fresh heads.
        packed: training rows.
        workers: this process among all.
        total: steps of the run.
        run: the run directory.
    """
    if recipe.lora.rank == 0:
        return HeadsJob(recipe, base, heads, packed, workers, total, run)
    from train.joint_job import JointJob  # peft takes seconds to import

    return JointJob(recipe, base, heads, packed, workers, total)


class HeadsJob:
    """Medusa-1: the base stays frozen, so positions of many rows are mixed and hidden states may come from the disk."""

    def __init__(
        self, recipe: Recipe, base: BaseModel, heads: DraftHeads, packed: PackedRows, workers: Workers, total: int,
        run: Path,
    ) -> None:  # fmt: skip
        self.module = HeadsLoss(heads, base, recipe.engine.loss_rows, recipe.optim.loss)
        self.groups = [list(heads.parameters())]
        self._recipe, self._packed, self._workers, self._total = recipe, packed, workers, total
        self._states = _hidden_states(recipe, base, packed, run)
        self._hidden_size = base.hidden_size
        self._last: Block | None = None

    def prepare(self) -> None:
        """Fill the cache of hidden states where it is to be filled at once."""
        if self._recipe.cache.mode == "offline" and isinstance(self._states, HiddenCache):
            workers, rows = self._workers, torch.arange(len(self._packed))
            mine = rows[workers.rank :: workers.world_size]  # whatever is there already, all lack about as many
            self._states.fill(mine, self._recipe.optim.micro_rows, shown=workers.rank == 0)
            workers.wait()

    def label_counts(self, step: int) -> Tensor:
        """See `Job`."""
        return self._block(step).label_counts(step)

    def weights(self, step: int, counts: Tensor) -> Tensor:
        """See `Job`."""
        return head_weights(self._recipe.optim, counts[1:])

    def rates(self, step: int) -> list[float]:
        """See `Job`."""
        return [learning_rate(self._recipe.optim, step, self._total)]

    def micro_batches(self, step: int, weights_C: Tensor) -> Iterator[tuple[tuple[Any, ...], bool]]:
        """Kept positions, as many as make `loss_rows` rows of logits."""
        size = max(1, self._recipe.engine.loss_rows // self._recipe.heads.num_heads)
        for micro, last in self._block(step).micro_batches(step, self._states, size):
            teacher = () if micro.teacher is None else (micro.teacher, micro.teacher_rows)
            yield (micro.hidden, micro.path, micro.labels, weights_C, *teacher), last

    def flush(self) -> None:
        """See `Job`."""
        self._states.flush()

    def save_adapter(self, directory: Path) -> str:
        """See `Job`."""
        return ""

    def _block(self, step: int) -> Block:
        """The block of a step; a new one when the last is used up."""
        optim, workers = self._recipe.optim, self._workers
        first = step - step % optim.mix_steps
        if self._last is None or self._last.first != first:
            steps = min(optim.mix_steps, self._total - first)
            self._last = None  # its hidden states go before the next ones come
            num_heads = self._recipe.heads.num_heads
            process = workers.rank, workers.world_size
            self._last = Block(optim, self._packed, num_heads, first, steps, *process, self._hidden_size)
        return self._last


def _hidden_states(recipe: Recipe, base: BaseModel, packed: PackedRows, run: Path) -> HiddenStates:
    cache, num_heads = recipe.cache, recipe.heads.num_heads
    passes = BasePass(base, packed, num_heads, recipe.optim.micro_rows)
    online: HiddenStates = EvenPasses(passes, base.device) if recipe.base.shard else passes
    if cache.mode == "online":
        return online
    directory = Path(cache.directory) if cache.directory else run / "hidden"
    return HiddenCache(directory, base, packed, num_heads, online, cache.shard_mb * 10**6)
