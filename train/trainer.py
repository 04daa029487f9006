"""The training run: batches of a job -> loss -> DeepSpeed step, with evaluations and checkpoints between.

Shapes: K heads, C columns of the loss: the K heads, behind the base where it is trained too.
"""

import logging
import math
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from medusa.formats.native import save_heads
from medusa.heads import DraftHeads, build_heads
from medusa.model import MedusaModel
from train.config import Recipe
from train.evaluate import accuracy_figures, head_accuracy, served_tokens
from train.progress import Progress
from train.provenance import provenance
from train.report import write_report
from train.run_directory import Position, RunDirectory
from train.schedule import mixed_seed
from train.setup import Parts, set_up
from train.stop import StopRequest
from train.trackers import Trackers
from train.workers import Workers, failures_named

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
        MemoryError: a device has no memory left.
    """
    directory = RunDirectory(recipe.run)
    workers = Workers.start(recipe.engine.device, stop)
    disable_progress_bar()
    with failures_named():
        if workers.from_first(lambda: directory.finished(recipe)):
            LOGGER.info("run is finished; its heads are in %s", directory.heads)
            return
        writer = workers.rank == 0
        with directory.locked() if writer else nullcontext(), Trackers(recipe, directory, writer) as trackers:
            Trainer(set_up(recipe, directory, workers)).run(trackers)


class Trainer:
    """One run, seen from one process.

    Args:
        parts: All that it needs, see ``train.setup``.
    """

    def __init__(self, parts: Parts) -> None:
        self.recipe, self.directory, self.workers = parts.recipe, parts.directory, parts.workers
        self.base, self.packed, self.heldout = parts.base, parts.packed, parts.heldout
        self.job, self.engine, self._config = parts.job, parts.engine, parts.config
        self.total, self.step, self.seconds = parts.start.total, parts.start.step, parts.start.seconds
        self.useful = 0  # labels of the base since this process began, for the tokens per second
        self._began = self.seconds

    def run(self, trackers: Trackers) -> None:
        """Make the remaining steps, evaluate, and write the heads.

        Raises:
            Stopped: a signal asked for it; the checkpoint is of the last step.
        """
        writer, stop = self.workers.rank == 0, self.workers.stop
        if writer:
            self.directory.start(self.recipe, self.step)
        stop.hold()
        with Progress(self.step, self.total, writer) as progress:
            while self.step < self.total:
                figures = self.train_step()
                progress.update(self.step, figures)
                if self._due(self.recipe.evaluate.every_steps) and self.step < self.total and not stop.agreed:
                    figures |= self.evaluate()
                if writer:
                    self._log(figures, trackers)
                if self._due(self.recipe.log.checkpoint_steps) or self.step == self.total or stop.agreed:
                    self.save_checkpoint()
                stop.raise_if_agreed(self.step)
            self._finish(trackers)

    def train_step(self) -> dict[str, Any]:
        """One optimizer step over the rows of all processes; returns its line of metrics.jsonl."""
        began = time.monotonic()
        recipe, workers, job, step = self.recipe, self.workers, self.job, self.step
        torch.manual_seed(mixed_seed(recipe.optim.seed, step))  # randomness depends on the step: nothing to resume
        counts = job.label_counts(step)
        weights_C, rates = job.weights(step, counts), job.rates(step)
        sums_2C = torch.zeros(2, len(weights_C), dtype=torch.float64, device=workers.device)
        for inputs, last in job.micro_batches(step, weights_C.to(workers.device)):
            loss, loss_C, correct_C = self.engine(*inputs)
            self.engine.backward(loss, last)
            sums_2C += torch.stack([loss_C, correct_C])
        self.engine.step(*rates)

        sums_2C = workers.total(sums_2C)
        self.step += 1
        self.seconds += time.monotonic() - began
        self.useful += int(counts[0])
        total, norm = float((sums_2C[0] * weights_C).sum()), self.engine.gradient_norm
        _check_finite(self.step, total, norm)
        return {
            "step": self.step,
            "epoch": round(self.step * recipe.optim.rows_per_step / len(self.packed), 4),
            "loss": total,
            **_column_figures(sums_2C, counts, weights_C),
            "lr": rates[0],
            "grad_norm": norm,
            "useful_tokens": int(counts[0]),
            "useful_tokens_per_s": self.useful / (self.seconds - self._began),
            "train_seconds": self.seconds,
        }

    def evaluate(self) -> dict[str, Any]:
        """Held-out accuracy per head and tokens per step as served; {} without held-out samples, or when stopped."""
        if self.heldout is None:
            return {}
        options, workers = self.recipe.evaluate, self.workers
        self.base.model.eval()  # joint training leaves dropout on
        heads = self._trained_heads().to(workers.device, self.base.lm_head_weight.dtype).eval()
        together = self.recipe.base.shard  # all processes read the same rows, since they share each pass
        rows = torch.arange(len(self.heldout.rows))
        mine = rows if together else rows[workers.rank :: workers.world_size]
        counts = head_accuracy(self.base, heads, self.heldout.rows, mine, self.recipe.optim.micro_rows)
        counts = workers.total(counts).long() // (workers.world_size if together else 1)
        figures: dict[str, Any] = {f"heldout_{name}": values for name, values in accuracy_figures(counts).items()}
        if options.prompts and not together:
            prompts = self.heldout.prompts[workers.rank :: workers.world_size]
            model, wanted = MedusaModel(self.base, heads), workers.stop.unless_asked(prompts)
            served = workers.total(torch.tensor(served_tokens(model, wanted, options.max_new_tokens, options.nodes)))
            if workers.stop.agreed:
                return {}
            figures["heldout_tokens_per_step"] = float(served[0] / served[1])
        return figures

    def save_checkpoint(self) -> None:
        """Write a checkpoint; it counts from the moment when `latest` names it."""
        self.job.flush()
        state = self.engine.state()
        if self.workers.rank == 0:
            position = Position(self.step, self.total, self.seconds, self.packed.fingerprint())
            self.directory.save(position, state, self.recipe.log.keep)
        self.workers.wait()

    def _finish(self, trackers: Trackers) -> None:
        figures = {"step": self.step, "steps": self.total, "train_seconds": self.seconds} | self.evaluate()
        self.workers.stop.raise_if_agreed(self.step)
        heads = self._trained_heads()
        if self.workers.rank == 0:
            self._log(figures, trackers, last=True)
            with self.directory.writing():
                adapter = self.job.save_adapter(self.directory.heads)
                heads = heads.with_config(base_adapter=adapter)
                origin = provenance(self.recipe, figures, self.base, self.packed, self.workers)
                save_heads(heads, self.directory.heads, origin)
            LOGGER.info("heads are in %s", self.directory.heads)
        self.workers.wait()

    def _log(self, figures: dict[str, Any], trackers: Trackers, last: bool = False) -> None:
        self.directory.log(figures)
        trackers.log(figures, last)
        if last or "heldout_top1" in figures:
            with self.directory.writing():
                write_report(self.directory.path)

    def _trained_heads(self) -> DraftHeads:
        """A whole float32 copy of the heads on the CPU; all processes call it."""
        heads = build_heads(self._config)
        heads.load_state_dict({
            name.removeprefix("heads."): value
            for name, value in self.engine.full_state().items() if name.startswith("heads.")
        })  # fmt: skip
        return heads

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0


def _column_figures(sums_2C: Tensor, counts: Tensor, weights_C: Tensor) -> dict[str, Any]:
    """Mean losses and shares of right answers: of each head, and of the base where it is trained."""
    means_2C = sums_2C / counts[-len(weights_C) :].clamp(min=1)
    num_heads = len(counts) - 1
    loss_K, top1_K = means_2C[:, -num_heads:].tolist()
    figures: dict[str, Any] = {"head_loss": loss_K, "head_top1": top1_K}
    if len(weights_C) > num_heads and weights_C[0]:
        figures |= {"base_loss": float(means_2C[0, 0]), "base_top1": float(means_2C[1, 0])}
    return figures


def _check_finite(step: int, loss: float, norm: float) -> None:
    if not math.isfinite(loss + norm):
        raise ValueError(
            f"loss ({loss}) or gradient norm ({norm}) of step {step} is not finite, which spoils the heads; "
            "lower optim.lr or raise optim.warmup, and give another directory (--recipe.run DIR)"
        )
