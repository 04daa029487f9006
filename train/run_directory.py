"""The run directory: recipe.yaml, metrics.jsonl, checkpoints/, heads/.

A checkpoint counts once `checkpoints/latest` names it. That pointer is replaced atomically after the checkpoint is on
the disk, so a run that dies at any moment goes on from the checkpoint before.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from train.config import Recipe
from train.recipe_file import RecipeError, differences, resolved


@dataclass(frozen=True)
class Position:
    """What `checkpoints/latest` says."""

    step: int
    """Completed optimizer steps."""
    total: int
    """Steps of the whole run."""
    world_size: int
    """Processes that wrote the checkpoint."""
    data: str
    """Fingerprint of the packed training rows."""

    @property
    def tag(self) -> str:
        """Name of the checkpoint's directory."""
        return f"step-{self.step}"


class RunDirectory:
    """Files of one run. Every process may read; process 0 alone calls what writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.heads = self.path / "heads"
        self._recipe = self.path / "recipe.yaml"
        self._metrics = self.path / "metrics.jsonl"
        self._latest = self.checkpoints / "latest"

    def position(self) -> Position | None:
        """The newest complete checkpoint, or None."""
        if not self._latest.is_file():
            return None
        return Position(**json.loads(self._latest.read_text(encoding="utf-8")))

    def finished(self) -> bool:
        """Whether the last step was made and the trained heads were written."""
        position = self.position()
        return position is not None and position.step == position.total and (self.heads / "config.json").is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory alone; the lock ends with the process, however it dies.

        Raises:
            BlockingIOError: another process trains here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(
                    f"run directory ({self.path}) is in use by another process; wait for it, stop it, or give another "
                    "directory (--recipe.run DIR)"
                ) from None
            yield

    def check(self, recipe: Recipe) -> None:
        """Refuse to go on with another recipe than the run was started with.

        Raises:
            RecipeError: names all values that differ and matter.
        """
        if self.position() is None or not self._recipe.is_file():
            return
        changed = differences(recipe, yaml.safe_load(self._recipe.read_text(encoding="utf-8")))
        if changed:
            raise RecipeError(
                f"run directory ({self.path}) holds a run of another recipe:\n  "
                + "\n  ".join(changed)
                + "\ngive another directory (--recipe.run DIR), restore these values, or delete the directory"
            )

    def start(self, recipe: Recipe, step: int) -> None:
        """Write the resolved recipe and drop metrics of steps that will be done again."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        _replace(self._recipe, yaml.safe_dump(resolved(recipe), sort_keys=False))
        kept = [json.dumps(record) for record in self.records() if record["step"] <= step]
        _replace(self._metrics, "".join(f"{line}\n" for line in kept))

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        lines = self._metrics.read_text(encoding="utf-8").splitlines() if self._metrics.is_file() else []
        return [record for line in lines if (record := _parse(line)) is not None]

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def commit(self, position: Position, keep: int) -> None:
        """Make a written checkpoint the newest one and delete all but the last `keep`."""
        for file in (self.checkpoints / position.tag).rglob("*"):
            _sync(file)
        _replace(self._latest, json.dumps(asdict(position)))
        older = sorted(self.checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        for path in older[:-keep]:
            shutil.rmtree(path)

    def discard(self, tag: str) -> None:
        """Delete what an interrupted run may have left of a checkpoint."""
        shutil.rmtree(self.checkpoints / tag, ignore_errors=True)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # the line that the process died in
        return None
    return record


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
