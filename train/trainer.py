"""The training job: frozen base -> hidden states -> heads -> loss -> DeepSpeed step.

Shapes: M kept positions, K heads, D hidden size.
"""

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from data import resolve_base_name
from data.packing import PackedRows, pack
from data.rows import open_rows
from data.sources import Sample, Source, read_samples
from medusa.base_model import BaseModel
from medusa.formats.native import save_heads
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.model import MedusaModel
from train.blocks import Block
from train.config import Recipe
from train.engine import Engine
from train.evaluate import accuracy_figures, head_accuracy, held_out_prompts, served_tokens
from train.features import BasePass, HiddenStates
from train.hidden_cache import HiddenCache
from train.losses import HeadsLoss
from train.progress import Progress, WandbReport
from train.provenance import provenance
from train.recipe_file import RecipeError
from train.run_directory import Position, RunDirectory
from train.schedule import head_weights, learning_rate, mixed_seed, total_steps
from train.stop import StopRequest
from train.workers import Workers, lost_processes_named

LOGGER = logging.getLogger("train")


def train(recipe: Recipe, stop: StopRequest) -> None:
    """Train heads from where the run directory stands to the recipe's last step, and write them to <run>/heads.

    Args:
        recipe: the run.
        stop: signals that this process takes.

    Raises:
        RecipeError: the run directory belongs to another recipe, or the recipe does not fit the processes.
        ValueError, OSError: samples or base cannot be read, or the run directory cannot be written.
        Stopped: a signal asked for it; the run directory holds a checkpoint of the last step.
        LostProcessError: another process is gone.
    """
    directory = RunDirectory(recipe.run)
    workers = Workers.start(recipe.engine.device, stop)
    disable_progress_bar()
    with lost_processes_named():
        if workers.from_first(lambda: directory.finished(recipe)):
            LOGGER.info("run is finished; its heads are in %s", directory.heads)
            return
        with directory.locked() if workers.rank == 0 else nullcontext():
            Trainer(recipe, directory, workers).run()


class Trainer:
    """One run, seen from one process."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, workers: Workers) -> None:
        _check_rows(recipe, workers)
        self.recipe, self.directory, self.workers = recipe, directory, workers
        base_name = resolve_base_name(recipe.base.name)
        dtype = None if recipe.base.dtype == "auto" else getattr(torch, recipe.base.dtype)
        self.base = BaseModel.load(base_name, dtype=dtype, device=workers.device)
        self.packed = self._read_training_rows()
        self.heldout = self._read_heldout()
        self.heldout_packed = pack(self.heldout, recipe.data.row_tokens) if self.heldout else None
        self.total = total_steps(recipe.optim, len(self.packed))

        torch.manual_seed(recipe.optim.seed)
        heads = build_heads(self._heads_config(str(base_name)))
        heads.init_from_base(self.base.lm_head_weight)
        loss = HeadsLoss(heads, self.base, recipe.engine.loss_rows, recipe.optim.loss)
        self.engine = Engine(loss, recipe.optim, recipe.engine, workers.device)
        self.step, self.seconds = 0, 0.0
        self._resume()
        self.states = self._hidden_states()
        self.block: Block | None = None
        self.useful = 0  # labels of the base since this process began, for the tokens per second
        self._began = self.seconds

    def run(self) -> None:
        """Make the remaining steps, evaluate, and write the heads.

        Raises:
            Stopped: a signal asked for it; the checkpoint is of the last step.
        """
        writer, stop = self.workers.rank == 0, self.workers.stop
        if writer:
            self.directory.start(self.recipe, self.step)
        report = WandbReport(self.recipe, self.directory.path, writer)
        with stop.held(), Progress(self.step, self.total, writer) as progress:
            while self.step < self.total:
                figures = self.train_step()
                progress.update(self.step, figures)
                if self._due(self.recipe.evaluate.every_steps) and self.step < self.total and not stop.agreed:
                    figures |= self.evaluate()
                if writer:
                    self.directory.log(figures)
                    report.log(figures)
                if self._due(self.recipe.log.checkpoint_steps) or self.step == self.total or stop.agreed:
                    self.save_checkpoint()
                stop.raise_if_agreed(self.step)
            self._finish(report)

    def train_step(self) -> dict[str, Any]:
        """One optimizer step over the rows of all processes; returns its line of metrics.jsonl."""
        began = time.monotonic()
        recipe, workers, num_heads = self.recipe, self.workers, self.recipe.heads.num_heads
        torch.manual_seed(mixed_seed(recipe.optim.seed, self.step))  # randomness depends on the step: nothing to resume
        block = self._block_of_step()
        useful, *counts = block.label_counts(self.step).tolist()
        counts_K = torch.tensor(counts)
        weights_K = head_weights(recipe.optim, counts_K).to(workers.device)
        lr = learning_rate(recipe.optim, self.step, self.total)

        sums_2K = torch.zeros(2, num_heads, dtype=torch.float64, device=workers.device)
        size = max(1, recipe.engine.loss_rows // num_heads)
        for micro, last in block.micro_batches(self.step, self.states, size):
            teacher = () if micro.teacher is None else (micro.teacher, micro.teacher_rows)
            loss, loss_K, correct_K = self.engine(micro.hidden, micro.path, micro.labels, weights_K, *teacher)
            self.engine.backward(loss, last)
            sums_2K += torch.stack([loss_K, correct_K])
        self.engine.step(lr)

        loss_K, correct_K = workers.total(sums_2K)
        self.step += 1
        self.seconds += time.monotonic() - began
        self.useful += useful
        return {
            "step": self.step,
            "epoch": round(self.step * recipe.optim.rows_per_step / len(self.packed), 4),
            "loss": float((loss_K * weights_K.cpu()).sum()),
            "head_loss": (loss_K / counts_K.clamp(min=1)).tolist(),
            "head_top1": (correct_K / counts_K.clamp(min=1)).tolist(),
            "lr": lr,
            "grad_norm": self.engine.gradient_norm,
            "useful_tokens": useful,
            "useful_tokens_per_s": self.useful / (self.seconds - self._began),
            "train_seconds": self.seconds,
        }

    def _block_of_step(self) -> Block:
        """The block of the next step; a new one when the last is used up."""
        optim = self.recipe.optim
        first = self.step - self.step % optim.mix_steps
        if self.block is None or self.block.first != first:
            steps = min(optim.mix_steps, self.total - first)
            workers = self.workers
            self.block = None  # its hidden states go before the next ones come
            self.block = Block(
                optim, self.packed, self.recipe.heads.num_heads, first, steps, workers.rank, workers.world_size
            )
        return self.block

    def evaluate(self) -> dict[str, Any]:
        """Held-out accuracy per head and tokens per step as served; {} without held-out samples, or when stopped."""
        if self.heldout_packed is None:
            return {}
        options, workers = self.recipe.evaluate, self.workers
        heads = self._trained_heads().to(workers.device, self.base.lm_head_weight.dtype).eval()
        rows = torch.arange(len(self.heldout_packed))[: options.rows or None]
        mine = rows[workers.rank :: workers.world_size]
        counts = head_accuracy(self.base, heads, self.heldout_packed, mine, self.recipe.optim.micro_rows)
        accuracy = accuracy_figures(workers.total(counts).long())
        figures: dict[str, Any] = {f"heldout_{name}": values for name, values in accuracy.items()}
        if options.prompts:
            longest = max(1, self.base.context_length - options.max_new_tokens)
            prompts = held_out_prompts(self.heldout, options.prompts, longest)[workers.rank :: workers.world_size]
            model, wanted = MedusaModel(self.base, heads), workers.stop.unless_asked(prompts)
            served = workers.total(torch.tensor(served_tokens(model, wanted, options.max_new_tokens, options.nodes)))
            if workers.stop.agreed:
                return {}
            figures["heldout_tokens_per_step"] = float(served[0] / served[1])
        return figures

    def save_checkpoint(self) -> None:
        """Write a checkpoint; it counts from the moment when `latest` names it."""
        self.states.flush()
        state = self.engine.state()
        if self.workers.rank == 0:
            position = Position(self.step, self.total, self.seconds, self.packed.fingerprint())
            self.directory.save(position, state, self.recipe.log.keep)
        self.workers.wait()

    def _resume(self) -> None:
        position = self.workers.from_first(self.directory.position)
        if position is None:
            return
        if position.data != self.packed.fingerprint():
            raise RecipeError(
                f"data.train ({self.recipe.data.train}) holds other samples than at the start of the run "
                f"({self.recipe.run}); restore the file or give another directory (--recipe.run DIR)"
            )
        self.engine.load_state(self.directory.tensors(position) if self.workers.rank == 0 else {})
        self.step = position.step
        self.seconds = position.seconds
        LOGGER.info("resumed at step %d of %d", self.step, self.total)

    def _finish(self, report: WandbReport) -> None:
        figures = {"step": self.step, "steps": self.total, "train_seconds": self.seconds} | self.evaluate()
        self.workers.stop.raise_if_agreed(self.step)
        heads = self._trained_heads()
        if self.workers.rank == 0:
            self.directory.log(figures)
            report.log(figures)
            with self.directory.writing():
                save_heads(heads, self.directory.heads, provenance(self.recipe, figures, self.workers.world_size))
            LOGGER.info("heads are in %s", self.directory.heads)
        report.finish()
        self.workers.wait()

    def _read_training_rows(self) -> PackedRows:
        data = self.recipe.data
        source = Source(data.train, data.train_split, data.subset, data.streaming, data.limit)
        packed = open_rows(source, self.base.tokenizer, data.row_tokens, data.cache)
        LOGGER.info("%d rows of %d tokens, %.1f %% filled", len(packed), data.row_tokens, 100 * packed.fill)
        return packed

    def _read_heldout(self) -> list[Sample]:
        data = self.recipe.data
        if not data.heldout:
            return []
        limit = data.limit if data.streaming else 0
        source = Source(data.heldout, data.heldout_split, data.subset, data.streaming, limit)
        return read_samples(source, self.base.tokenizer)

    def _hidden_states(self) -> HiddenStates:
        cache, optim, num_heads = self.recipe.cache, self.recipe.optim, self.recipe.heads.num_heads
        base = BasePass(self.base, self.packed, num_heads, optim.micro_rows)
        if cache.mode == "online":
            return base
        directory = Path(cache.directory) if cache.directory else self.directory.path / "hidden"
        states = HiddenCache(directory, self.base, self.packed, num_heads, base, cache.shard_mb * 10**6)
        if cache.mode == "offline":
            mine = torch.arange(len(self.packed)).tensor_split(self.workers.world_size)[self.workers.rank]
            states.fill(mine, optim.micro_rows, shown=self.workers.rank == 0)
            self.workers.wait()
        return states

    def _heads_config(self, base_name: str) -> HeadsConfig:
        heads = self.recipe.heads
        return HeadsConfig(
            hidden_size=self.base.hidden_size,
            vocab_size=self.base.vocab_size,
            num_heads=heads.num_heads,
            num_layers=heads.num_layers,
            own_lm_heads=heads.own_lm_heads,
            base=base_name,
            architecture=heads.architecture,
        )

    def _trained_heads(self) -> DraftHeads:
        """A whole float32 copy of the heads on the CPU; all processes call it."""
        heads = build_heads(self._heads_config(str(resolve_base_name(self.recipe.base.name))))
        heads.load_state_dict({
            name.removeprefix("heads."): value for name, value in self.engine.full_state().items()
        })  # fmt: skip
        return heads

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0


def _check_rows(recipe: Recipe, workers: Workers) -> None:
    if recipe.optim.rows_per_step < workers.world_size:
        raise RecipeError(
            f"optim.rows_per_step ({recipe.optim.rows_per_step}) leaves some of the processes ({workers.world_size}) "
            "without a row; raise it or start fewer processes"
        )
