"""Training in a child process, `medusa train`, with its progress."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from medusa.data.child import started
from medusa.files import replace_text
from medusa.train.config import Recipe
from medusa.train.own.answers import HELDOUT, TRAIN
from medusa.train.own.plan import Plan
from medusa.train.own.screen import Tell
from medusa.train.recipe_file import build_recipe, read_recipe
from medusa.train.run_directory import RunDirectory
from medusa.train.stop import Stopped

LOG = "train.log"
LOOK_SECONDS = 1.0
"""Seconds between two readings of the run's figures."""
LAST_WORDS = 6
"""Number of log lines that an error repeats."""


def write_recipe(plan: Plan, out: Path) -> Path:
    """Write the plan's recipe; an existing file stays, because training has written it with every value."""
    path = out / "recipe.yaml"
    if not path.exists():
        replace_text(path, yaml.safe_dump(asdict(full_recipe(plan.recipe, out)), sort_keys=False))
    return path


def full_recipe(values: dict[str, Any], out: Path) -> Recipe:
    """The recipe of these values for a run in this directory."""
    places = {"run": out, "data.train": out / TRAIN, "data.heldout": out / HELDOUT, "data.cache": out / "rows"}
    return build_recipe({**{key: str(path) for key, path in places.items()}, **values})


def finished(recipe: Path, out: Path) -> bool:
    """Whether the trained heads exist.

    Raises:
        RecipeError: the run was begun with another recipe.
    """
    return RunDirectory(out).finished(read_recipe(recipe))


def train(plan: Plan, recipe: Path, out: Path, tell: Tell) -> None:
    """Train to the end in a child process, which resumes from its last checkpoint.

    Args:
        plan: the plan.
        recipe: the recipe file.
        out: the directory of the run.
        tell: called with the progress.

    Raises:
        Stopped: a signal (or Ctrl-C) ended it after a checkpoint.
        RuntimeError: training failed; the message holds the last lines of its log.
    """
    words = [sys.executable, "-m", "medusa", "train", "--recipe", str(recipe)]
    with (
        (out / LOG).open("a", encoding="utf-8") as log,
        started(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as (child, received),
    ):
        while True:
            try:
                status = child.wait(LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                tell(*_progress(plan, out))
    if received:
        raise Stopped(received[0], "in training")
    if status:
        last = (out / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_WORDS:]
        raise RuntimeError(f"training failed (exit status {status}); {out / LOG} says:\n" + "\n".join(last))


def _progress(plan: Plan, out: Path) -> tuple[float, str]:
    """The share that is done, and the last figures."""
    first, epochs = plan.reading / plan.seconds["training"], plan.recipe["optim.epochs"]
    if record := RunDirectory(out).last_record():
        if "epoch" not in record:  # the record of the run's end
            return 1.0, "evaluated"
        done = min(1.0, record["epoch"] / epochs)
        return first + (1 - first) * done, f"epoch {record['epoch']:.2f} of {epochs:g}, loss {record['loss']:.3f}"
    kept = sum(path.stat().st_size for path in out.glob("hidden/*.safetensors"))
    share = min(1.0, kept / plan.state_bytes) if plan.state_bytes else 0.0
    return first * share, "hidden states of the base" if kept else "the base is loaded"
