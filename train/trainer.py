"""The training run: set-up, then batches -> loss -> DeepSpeed step, with evaluations and checkpoints between.

Shapes: K heads, C columns of the loss: the K heads, after the base if it is trained too.
"""

import copy
import logging
import math
import time
from contextlib import closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from medusa.data.rows import open_rows
from medusa.data.sources import Source
from medusa.formats.native import save_heads
from medusa.heads import DraftHeads, build_heads
from medusa.loading.self_test import choose_decoding
from medusa.loading.separation import choose_separation
from medusa.model import MedusaModel
from medusa.train.base import load_base
from medusa.train.best import KEY, Best
from medusa.train.config import Recipe
from medusa.train.engine import Engine
from medusa.train.evaluate import accuracy_figures, head_accuracy, served_counts, served_figures
from medusa.train.fresh_heads import feature_layers, fresh_heads
from medusa.train.held_out import read_held_out
from medusa.train.medusa1 import Medusa1
from medusa.train.progress import Progress
from medusa.train.provenance import provenance
from medusa.train.recipe_file import RecipeError
from medusa.train.report import write_report
from medusa.train.run_directory import Position, RunDirectory
from medusa.train.schedule import column_weights, doubts, learning_rates, mixed_seed, total_steps
from medusa.train.stop import StopRequest
from medusa.train.trackers import Trackers
from medusa.train.workers import Workers, check_same, failures_named

if TYPE_CHECKING:
    from medusa.train.medusa2 import Medusa2

LOGGER = logging.getLogger("medusa.train")


def train(recipe: Recipe, stop: StopRequest) -> None:
    """Train heads from the run directory's last checkpoint to the recipe's last step, and write them to <run>/heads.

    Args:
        recipe: the run.
        stop: signals that this process takes.

    Raises:
        RecipeError: the run directory belongs to another recipe, or the recipe does not fit the processes.
        ValueError, OSError: samples or base cannot be read, or the run directory cannot be written.
        Stopped: a signal ended the run; the run directory holds a checkpoint of the last step.
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
    """One run, on one process. The constructor prepares everything up to the next step.

    All processes construct it together. Mistakes are reported early, before the parts that take long.

    Args:
        recipe: the run.
        directory: its run directory.
        workers: this process among all.

    Raises:
        RecipeError: the run directory belongs to other samples, or the recipe does not fit the base or the processes.
        ValueError, OSError: samples, base or checkpoint cannot be read.
    """

    def __init__(self, recipe: Recipe, directory: RunDirectory, workers: Workers) -> None:
        self.recipe, self.directory, self.workers = recipe, directory, workers
        data, optim, vocabulary = recipe.data, recipe.optim, recipe.heads.draft_vocab
        if optim.rows_per_step < workers.world_size:
            raise RecipeError(
                f"optim.rows_per_step ({optim.rows_per_step}) leaves some of the processes ({workers.world_size}) "
                "without a row; raise it or start fewer processes"
            )
        base = choose_decoding(load_base(recipe.base, workers))  # heads are of no use if the base cannot verify drafts
        base = base.tapped(feature_layers(recipe.heads, base.num_layers))
        if vocabulary > base.vocab_size:
            raise RecipeError(
                f"heads.draft_vocab ({vocabulary}) is more than the vocabulary of the base ({base.vocab_size}); lower "
                "it, or give 0 for all of it"
            )

        prompts = data.supervise == "all"
        source = Source(data.train, data.train_split, data.subset, data.streaming, data.limit, prompts)
        self.packed = packed = open_rows(
            source, base.tokenizer, data.row_tokens, data.cache, vocabulary=base.vocab_size
        )
        LOGGER.info("%d rows of %d tokens, %.1f %% filled", len(packed), data.row_tokens, 100 * packed.fill)
        check_same(recipe, packed.fingerprint(), workers)
        position = workers.from_first(directory.position)
        if position is not None and position.data != packed.fingerprint():  # before caches of other samples are refused
            raise RecipeError(
                f"data.train ({data.train}) holds other samples than at the start of the run ({recipe.run}); restore "
                "the file or give another directory (--recipe.run DIR)"
            )
        self.base = base = choose_separation(base, packed.input_ids[0].long(), workers.any)
        self.heldout = workers.from_first(partial(read_held_out, data, recipe.evaluate, base, packed))

        heads, self.total = fresh_heads(recipe, base, packed, workers), total_steps(optim, len(packed))
        for doubt in doubts(optim, len(packed)):
            LOGGER.warning("%s", doubt)
        self.config = heads.config
        self.first = {
            name: value.cpu().clone()
            for name, value in heads.state_dict().items() if recipe.heads.init_share and value.is_floating_point()
        }  # fmt: skip
        parts = recipe, base, heads, packed, workers, self.total
        self.method: Medusa1 | Medusa2
        if recipe.lora.rank:
            from medusa.train import medusa2  # peft takes seconds to import

            self.method = medusa2.Medusa2(*parts)
        else:
            self.method = Medusa1(*parts)
        precision = recipe.engine.precision
        autocast = precision == "bfloat16" or (precision == "auto" and base.dtype == torch.bfloat16)
        self.engine = Engine(self.method.module, optim, recipe.engine, workers.device, self.method.groups, autocast)
        self.step, self.seconds = self._resume()
        self.best = Best(recipe, directory, self.step, workers)
        self.method.prepare()
        self.answers: dict[tuple[int, ...], list[int]] = {}  # answers of the base to held-out prompts
        self.useful = 0  # labels of the base since this process began
        self._began = self.seconds

    def run(self, trackers: Trackers) -> None:
        """Make the remaining steps, evaluate, and write the heads.

        Raises:
            Stopped: a signal ended the run after a checkpoint of the last step.
        """
        writer, stop = self.workers.rank == 0, self.workers.stop
        if writer:
            self.directory.start(self.recipe, self.step)
        stop.hold()
        self._make_up(trackers)
        if self.best.exhausted and self.step < self.total:  # it ended in its last evaluation, or was killed after it
            self.total = self.step
            if writer:
                self.directory.end_at(self._position())
        with closing(Progress(self.step, self.total, writer)) as progress:
            while self.step < self.total:
                figures = self.train_step()
                progress.update(self.step, figures)
                figures |= self._evaluate_if_due()
                if writer:
                    self._log(figures, trackers)
                if self.best.exhausted and self.step < self.total:
                    LOGGER.info("held-out accuracy no longer grows: the run ends at step %d", self.step)
                    self.total = self.step
                if self._due(self.recipe.log.checkpoint_steps) or self.step == self.total or stop.agreed:
                    self.save_checkpoint()
                stop.raise_if_agreed(self.step)
            self._finish(trackers)

    def train_step(self) -> dict[str, Any]:
        """One optimizer step over the rows of all processes; returns its line of metrics.jsonl."""
        began = time.monotonic()
        recipe, workers, method, step = self.recipe, self.workers, self.method, self.step
        torch.manual_seed(mixed_seed(recipe.optim.seed, step))  # depends on the step: nothing to resume
        counts = method.label_counts(step)
        weights_C, rates = column_weights(recipe, step, self.total, counts), learning_rates(recipe, step, self.total)
        sums_2C = torch.zeros(2, len(weights_C), dtype=torch.float64, device=workers.device)
        for inputs, last in method.micro_batches(step, weights_C.to(workers.device)):
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

    def evaluate(self, heads: DraftHeads) -> dict[str, Any]:
        """Held-out accuracy per head, tokens per step, and acceptance by depth in decoding.

        {} without held-out samples, or if the run was stopped.

        Args:
            heads: a copy of the trained heads, which stays as it is.
        """
        if self.heldout is None:
            return {}
        options, workers = self.recipe.evaluate, self.workers
        self.base.model.eval()  # joint training leaves dropout switched on
        heads = copy.deepcopy(heads).to(workers.device, self.base.lm_head_weight.dtype).eval()
        together = self.recipe.base.shard  # all processes read the same rows, because they make each pass together
        rows = torch.arange(len(self.heldout.rows))
        mine = rows if together else rows[workers.rank :: workers.world_size]
        counts = head_accuracy(self.base, heads, self.heldout.rows, mine, self.recipe.optim.micro_rows)
        counts = workers.total(counts).long() // (workers.world_size if together else 1)
        figures: dict[str, Any] = {f"heldout_{name}": values for name, values in accuracy_figures(counts).items()}
        if options.prompts and not together:
            prompts = self.heldout.prompts[workers.rank :: workers.world_size]
            model, wanted = MedusaModel(self.base, heads), workers.stop.unless_asked(prompts)
            if self.recipe.lora.rank:
                self.answers.clear()  # the base has changed
            served = served_counts(model, wanted, options.max_new_tokens, options.nodes, self.answers)
            served = workers.total(served)
            if workers.stop.agreed:
                return {}
            figures |= {f"heldout_{name}": values for name, values in served_figures(served).items()}
        return figures

    def _evaluate_if_due(self) -> dict[str, Any]:
        """The figures of an evaluation between two steps, whose heads may be the best ones; {} = none is due."""
        if not self._due(self.recipe.evaluate.every_steps) or self.step >= self.total or self.workers.stop.agreed:
            return {}
        found = self.evaluate(heads := self._trained_heads())
        self.best.observe(self.step, found, heads)
        return found

    def _make_up(self, trackers: Trackers) -> None:
        """The evaluation of the step that a resumed run begins with, if the signal that ended it left it out."""
        record = self.workers.from_first(self.directory.last_record)
        if record.get("step") == self.step and KEY not in record:
            if (found := self._evaluate_if_due()) and self.workers.rank == 0:
                self.directory.start(self.recipe, self.step - 1)
                self._log(record | found, trackers, more=True)
            self.workers.stop.raise_if_agreed(self.step)

    def save_checkpoint(self) -> None:
        """Write a checkpoint; it counts from the moment when `latest` names it."""
        self.method.flush()
        state = self.engine.state()
        if self.workers.rank == 0:
            self.directory.save(self._position(), state, self.recipe.log.keep)
        self.workers.wait()

    def _position(self) -> Position:
        return Position(self.step, self.total, self.seconds, self.packed.fingerprint())

    def _finish(self, trackers: Trackers) -> None:
        found = self.evaluate(heads := self._trained_heads())
        if (weights := self.best.weights(found)) is not None:
            heads.load_state_dict(weights)
            found = self.evaluate(heads) | {"heads_step": self.best.step}
            LOGGER.info("heads of step %d were the best, and are written", self.best.step)
        figures = {"step": self.step, "steps": self.total, "train_seconds": self.seconds} | found
        self.workers.stop.raise_if_agreed(self.step)
        if self.workers.rank == 0:
            self._log(figures, trackers, more=True)
            with self.directory.writing():
                adapter = self.method.save_adapter(self.directory.heads)
                heads = heads.with_config(base_adapter=adapter)
                origin = provenance(self.recipe, figures, self.base, self.packed, self.workers)
                save_heads(heads, self.directory.heads, origin)
            LOGGER.info("heads are in %s", self.directory.heads)
        self.workers.wait()

    def _log(self, figures: dict[str, Any], trackers: Trackers, more: bool = False) -> None:
        self.directory.log(figures)
        trackers.log(figures, more)
        if more or KEY in figures:
            with self.directory.writing():
                write_report(self.directory.path)

    def _trained_heads(self) -> DraftHeads:
        """A whole float32 copy of the heads on the CPU, with their share of the first ones; all processes call it."""
        heads = build_heads(self.config)
        state = {
            name.removeprefix("heads."): value
            for name, value in self.engine.full_state().items() if name.startswith("heads.")
        }  # fmt: skip
        for name, value in self.first.items():
            state[name].lerp_(value, self.recipe.heads.init_share)
        heads.load_state_dict(state)
        return heads

    def _resume(self) -> tuple[int, float]:
        """Load the last checkpoint into the engine; returns completed steps and the seconds spent in them."""
        position = self.workers.from_first(self.directory.position)
        if position is None:
            return 0, 0.0
        self.engine.load_state(self.directory.tensors(position) if self.workers.rank == 0 else {})
        LOGGER.info("resumed at step %d of %d", position.step, self.total)
        return position.step, position.seconds

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0


def _column_figures(sums_2C: Tensor, counts: Tensor, weights_C: Tensor) -> dict[str, Any]:
    """Mean losses and shares of right labels of each head, and of the base if it is trained."""
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
