"""The training run: batches of a job -> loss -> DeepSpeed step, with evaluations and checkpoints between.

Shapes: K heads, C columns of the loss: the K heads, behind the base where it is trained too.
"""

import logging
import math
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from data import resolve_base_name
from data.packing import PackedRows
from data.rows import open_rows
from data.sources import Source
from medusa.base.model import BaseModel
from medusa.base.taps import spread_layers
from medusa.budget.calibration import Calibration
from medusa.formats.native import save_heads
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.loading.self_test import choose_decoding
from medusa.loading.separation import choose_separation
from medusa.model import MedusaModel
from train.config import BaseRecipe, Recipe
from train.draft_vocabulary import check_draft_vocabulary, most_frequent_tokens
from train.engine import Engine
from train.evaluate import accuracy_figures, head_accuracy, served_tokens
from train.held_out import HeldOut, read_held_out
from train.jobs import build_job
from train.number_format import slow_in_bfloat16
from train.progress import Progress
from train.provenance import provenance, software
from train.quantised import load_options
from train.recipe_file import RecipeError, flatten, resolved
from train.report import write_report
from train.run_directory import Position, RunDirectory
from train.schedule import mixed_seed, total_steps
from train.stop import StopRequest
from train.trackers import Trackers
from train.workers import Workers, failures_named

LOGGER = logging.getLogger("train")
PLACES = {"run", "base.name", "data.train", "data.heldout", "data.cache", "cache.directory"}
"""Recipe keys that each machine may have its own value of."""


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
            Trainer(recipe, directory, workers).run(trackers)


class Trainer:
    """One run, seen from one process."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, workers: Workers) -> None:
        _check_rows(recipe, workers)
        self.recipe, self.directory, self.workers = recipe, directory, workers
        base_name = resolve_base_name(recipe.base.name)
        base = _load_base(str(base_name), recipe.base, workers)
        base = choose_decoding(base)  # heads of a base that verifies nothing are of no use
        self.base = base.tapped(spread_layers(recipe.heads.feature_layers, base.num_layers))
        check_draft_vocabulary(recipe.heads.draft_vocab, self.base.vocab_size)
        self.packed = self._read_training_rows()
        _check_same(recipe, self.packed, workers)
        self.base = choose_separation(self.base, self.packed.input_ids[0].long(), workers.any)
        self.heldout = workers.from_first(self._read_heldout)
        self.total = total_steps(recipe.optim, len(self.packed))

        torch.manual_seed(recipe.optim.seed)
        heads = build_heads(self._heads_config(str(base_name)))
        if heads.draft_ids is not None:
            ids = most_frequent_tokens(self.packed, len(heads.draft_ids), self.base.vocab_size, workers)
            heads.draft_ids.copy_(ids)
        heads.init_from_base(self.base.lm_head_weight)
        self.job = build_job(recipe, self.base, heads, self.packed, workers, self.total, directory.path)
        autocast = recipe.engine.precision == "bfloat16" or (
            recipe.engine.precision == "auto" and self.base.dtype == torch.bfloat16
        )
        self.engine = Engine(self.job.module, recipe.optim, recipe.engine, workers.device, self.job.groups, autocast)
        self.step, self.seconds = 0, 0.0
        self.calibration: Calibration | None = None  # of the last evaluation
        self._resume()
        self.job.prepare()
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
        self.calibration = Calibration.of(counts, self._calibration_origin(len(rows)))
        figures: dict[str, Any] = {
            f"heldout_{name}": values for name, values in accuracy_figures(self.calibration).items()
        }
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
                save_heads(heads, self.directory.heads, origin, self.calibration)
            LOGGER.info("heads are in %s", self.directory.heads)
        self.workers.wait()

    def _calibration_origin(self, rows: int) -> dict[str, Any]:
        """What the held-out counts belong to."""
        recipe = self.recipe
        return {
            "heads": f"{recipe.heads.num_heads} {recipe.heads.architecture}",
            "base": self.base.name,
            "data": {"source": recipe.data.heldout, "rows": rows, "row_tokens": recipe.data.row_tokens},
            "dtype": str(self.base.dtype).removeprefix("torch."),
            "step": self.step,
            **software(),
        }

    def _log(self, figures: dict[str, Any], trackers: Trackers, last: bool = False) -> None:
        self.directory.log(figures)
        trackers.log(figures, last)
        if last or "heldout_top1" in figures:
            with self.directory.writing():
                write_report(self.directory.path)

    def _read_training_rows(self) -> PackedRows:
        data = self.recipe.data
        source = Source(data.train, data.train_split, data.subset, data.streaming, data.limit)
        packed = open_rows(source, self.base.tokenizer, data.row_tokens, data.cache)
        LOGGER.info("%d rows of %d tokens, %.1f %% filled", len(packed), data.row_tokens, 100 * packed.fill)
        return packed

    def _read_heldout(self) -> HeldOut | None:
        data, options = self.recipe.data, self.recipe.evaluate
        if not data.heldout:
            return None
        longest = max(1, self.base.context_length - options.max_new_tokens)
        return read_held_out(data, options, self.base.tokenizer, self.packed, longest)

    def _heads_config(self, base_name: str) -> HeadsConfig:
        heads = self.recipe.heads
        return HeadsConfig(
            hidden_size=self.base.hidden_size,
            vocab_size=self.base.vocab_size,
            num_heads=heads.num_heads,
            num_layers=heads.num_layers,
            own_lm_heads=heads.own_lm_heads,
            base=base_name,
            base_source=self.base.source,
            architecture=heads.architecture,
            feature_layers=self.base.feature_layers,
            rank=heads.rank,
            draft_vocab_size=heads.draft_vocab,
        )

    def _trained_heads(self) -> DraftHeads:
        """A whole float32 copy of the heads on the CPU; all processes call it."""
        heads = build_heads(self._heads_config(str(resolve_base_name(self.recipe.base.name))))
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


def _load_base(name: str, base: BaseRecipe, workers: Workers) -> BaseModel:
    device = workers.device
    dtype = None if base.dtype == "auto" else getattr(torch, base.dtype)
    if dtype is None and workers.from_first(partial(slow_in_bfloat16, device)):
        dtype = torch.float32
    if not base.shard:
        return BaseModel.load(name, dtype=dtype, device=device, load_options=load_options(base, device))
    from train.sharded_base import load_sharded

    LOGGER.info("base is divided among the processes: held-out tokens per step are left out, as decoding may part them")
    return load_sharded(name, dtype, device)


def _check_rows(recipe: Recipe, workers: Workers) -> None:
    if recipe.optim.rows_per_step < workers.world_size:
        raise RecipeError(
            f"optim.rows_per_step ({recipe.optim.rows_per_step}) leaves some of the processes ({workers.world_size}) "
            "without a row; raise it or start fewer processes"
        )


def _check_finite(step: int, loss: float, norm: float) -> None:
    if not math.isfinite(loss + norm):
        raise ValueError(
            f"loss ({loss}) or gradient norm ({norm}) of step {step} is not finite, which spoils the heads; "
            "lower optim.lr or raise optim.warmup, and give another directory (--recipe.run DIR)"
        )


def _check_same(recipe: Recipe, packed: PackedRows, workers: Workers) -> None:
    """Refuse processes that would wait for each other in vain, or train on different samples."""
    ours = {key: value for key, value in flatten(resolved(recipe)) if key not in PLACES}
    ours["data.train"] = f"fingerprint {packed.fingerprint()}"
    theirs = workers.from_first(lambda: ours)
    odd = [f"{key} is {ours[key]} here, {theirs[key]} there" for key in ours if ours[key] != theirs[key]]
    if workers.total(torch.tensor(len(odd))):
        named = "; ".join(odd) or "its machine says what"
        raise RecipeError(
            f"processes have different recipes or samples (process {workers.rank} beside process 0: {named}); give all "
            "machines the same ones"
        )
