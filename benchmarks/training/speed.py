"""Useful tokens per second of whole trainers: supervised tokens of the data / seconds of training, base included."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import ratio
from benchmarks.training.original_way import OriginalTrainer, pad
from data.packing import IGNORE
from data.sources import read_samples
from medusa.clock import alternate, seconds
from train.recipe_file import read_recipe
from train.run_directory import RunDirectory
from train.setup import set_up
from train.trainer import Trainer
from train.workers import Workers

Overrides = Mapping[str, str]
CLOCKED = {"data.heldout": "", "optim.steps": "1000000"}
"""A trainer under a clock makes steps and nothing else, as many as it is asked for."""
MEDUSA = {
    "heads.architecture": "medusa", "heads.num_layers": "1", "heads.feature_layers": "0", "heads.own_lm_heads": "false",
    "optim.loss": "ce",
}  # fmt: skip
"""The original's heads and loss, whatever the recipe trains."""
ORIGINAL_WAY = "original way"


class OurEpochs:
    """The trainer of a recipe; an epoch is rounded up to whole steps.

    Args:
        recipe: the recipe's file.
        overrides: dotted key -> value, as on the command line.
        workers: this process.
        run: a fresh directory.

    Attributes:
        positions: tokens that the base reads per epoch, padding included.
        trained: parameters that are trained.
    """

    def __init__(self, recipe: str, overrides: Overrides, workers: Workers, run: Path) -> None:
        values = read_recipe(recipe, {**overrides, **CLOCKED, "run": str(run)})
        self.trainer = Trainer(set_up(values, RunDirectory(values.run), workers))
        self.steps = -(-len(self.trainer.packed) // values.optim.rows_per_step)
        self.positions = self.steps * values.optim.rows_per_step * values.data.row_tokens
        self.trained = sum(value.numel() for value in self.trainer.engine.full_state().values())

    def __call__(self) -> int:
        """Train one epoch; returns its supervised tokens."""
        return sum(self.trainer.train_step()["useful_tokens"] for _ in range(self.steps))


class OriginalEpochs:
    """The original's way over the samples of one of our trainers, with as many optimizer steps per epoch.

    Args:
        ours: its recipe names base, dtype, data, length and number of heads.
        to_longest: pad to the longest conversation of a micro-batch instead of the recipe's row length.
        micro_batch: conversations per forward pass.

    Attributes: as those of ours.
    """

    def __init__(self, ours: OurEpochs, to_longest: bool, micro_batch: int) -> None:
        recipe, base = ours.trainer.recipe, ours.trainer.base
        length, samples = recipe.data.row_tokens, read_samples(recipe.data.train, base.tokenizer)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(recipe.optim.seed))
        self._steps = [
            [pad([samples[index] for index in micro], length, to_longest) for micro in step.split(micro_batch)]
            for step in order.tensor_split(min(ours.steps, len(order)))
        ]
        batches = [batch for step in self._steps for batch in step]
        self._tokens = sum(int((labels_BT[:, 1:] != IGNORE).sum()) for *_, labels_BT in batches)
        self._trainer = OriginalTrainer(base.name, base.dtype, base.device, recipe.heads.num_heads, recipe.optim)
        self.positions = sum(ids_BT.numel() for ids_BT, *_ in batches)
        self.trained = sum(parameter.numel() for parameter in self._trainer.parameters)

    def __call__(self) -> int:
        """Train one epoch; returns its supervised tokens."""
        for micro_batches in self._steps:
            self._trainer.step(micro_batches)
        return self._tokens


def measure_speed(
    recipe: str, overrides: Overrides, workers: Workers, scratch: Path, rounds: int, micro_batch: int
) -> list[dict[str, Any]]:
    """The original's way beside ours, measured alternately, epoch by epoch.

    Args:
        recipe: the recipe's file.
        overrides: dotted key -> value.
        workers: this process; there is no other.
        scratch: an empty directory.
        rounds: timed epochs of each.
        micro_batch: conversations per forward pass of the original's way.

    Returns:
        One row per trainer; `tokens_per_s` is the median of the rounds, `over_original` the median of their ratios.
    """
    overrides = {**overrides, "cache.mode": "online"}
    as_is = OurEpochs(recipe, overrides, workers, scratch / "recipe")
    shared = {**overrides, **MEDUSA}
    own = {**shared, "engine.precision": "auto", "heads.own_lm_heads": "true"}  # as the original's way, by autocast
    epochs: dict[str, OurEpochs | OriginalEpochs] = {
        ORIGINAL_WAY: OriginalEpochs(as_is, False, micro_batch),
        "original way, padded to the longest": OriginalEpochs(as_is, True, micro_batch),
        "ours, the original's heads": OurEpochs(recipe, own, workers, scratch / "own"),
        "ours, its heads with the base's matrix": OurEpochs(recipe, shared, workers, scratch / "shared"),
        "ours, the recipe": as_is,
    }
    tokens, speeds = _speeds(epochs, workers, rounds)
    return [
        {
            "trainer": name,
            "trained_parameters": run.trained,
            "positions_per_useful_token": round(run.positions / tokens[name], 2),
            "useful_tokens_per_s": round(median(speeds[name]), 1),
            "over_original": round(ratio(speeds[name], speeds[ORIGINAL_WAY]), 3),
        }
        for name, run in epochs.items()
    ]


def measure_cache(
    recipe: str, overrides: Overrides, workers: Workers, scratch: Path, rounds: int
) -> list[dict[str, Any]]:
    """Epochs that compute hidden states beside epochs that read them from files, which memory may hold.

    Args:
        recipe, overrides, workers, rounds: as `measure_speed` takes them.
        scratch: an empty directory, which gets the cache.

    Returns:
        One row per kind of epoch; `epoch_s` is the median of the rounds, but the epoch that fills the cache is one.
    """
    hybrid = {"cache.mode": "hybrid", "cache.directory": str(scratch / "hidden")}
    online = OurEpochs(recipe, {**overrides, "cache.mode": "online"}, workers, scratch / "online")
    cached = OurEpochs(recipe, {**overrides, **hybrid}, workers, scratch / "cached")

    def fill() -> None:
        cached()
        cached.trainer.job.flush()

    filling = seconds(fill, workers.device)
    tokens, speeds = _speeds({"online": online, "cached": cached}, workers, rounds)
    size = sum(path.stat().st_size for path in (scratch / "hidden").iterdir())
    online_s = tokens["online"] / median(speeds["online"])
    rows = {
        "online": (online_s, 1.0),
        "the first one, which fills the cache": (filling, online_s / filling),
        f"cached ({size / 1e6:.0f} MB)": (
            tokens["cached"] / median(speeds["cached"]),
            ratio(speeds["cached"], speeds["online"]),
        ),
    }
    return [
        {"epoch": name, "epoch_s": round(time, 3), "over_online": round(over, 3)} for name, (time, over) in rows.items()
    ]


def _speeds(
    epochs: Mapping[str, Callable[[], int]], workers: Workers, rounds: int
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Supervised tokens of the last epoch, and useful tokens per second of every round, by name."""
    tokens: dict[str, int] = {}

    def tokens_per_s(name: str) -> float:
        def epoch() -> None:
            tokens[name] = epochs[name]()

        time = seconds(epoch, workers.device)
        return tokens[name] / time

    return tokens, alternate({name: lambda name=name: tokens_per_s(name) for name in epochs}, rounds)  # type: ignore[misc]
