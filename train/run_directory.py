"""The run directory: recipe.yaml, metrics.jsonl, checkpoints/, heads/, and best/ with evaluate.patience.

A checkpoint holds whole tensors (`checkpoint.safetensors`) and `state.json`, so a run can be resumed with any number of
processes and any ZeRO stage. It counts once `checkpoints/latest` names it. That pointer is replaced atomically after
the checkpoint is on the disk, so a run that dies at any moment, or fills the disk, resumes from the checkpoint before.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from safetensors import SafetensorError

from medusa.data.yaml_file import read_yaml
from medusa.files import peek_object, replace_text, sweep
from medusa.train.config import Recipe
from medusa.train.recipe_file import RecipeError, differences

TAIL = 8192
"""Number of bytes at the end of metrics.jsonl that hold at least one line."""

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Position:
    """The position of a checkpoint in the run: its `state.json`."""

    step: int
    """Completed optimizer steps."""
    total: int
    """Steps of the whole run."""
    seconds: float
    """Time spent in steps."""
    data: str
    """Fingerprint of the packed training rows."""

    @property
    def tag(self) -> str:
        """Name of the checkpoint's directory."""
        return f"step-{self.step}"


class RunDirectory:
    """Files of one run. Every process may read; only process 0 may write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.heads = self.path / "heads"
        self.best = self.path / "best"
        self._recipe = self.path / "recipe.yaml"
        self._metrics = self.path / "metrics.jsonl"
        self._latest = self.checkpoints / "latest"

    def position(self) -> Position | None:
        """The newest complete checkpoint, or None."""
        if not self._latest.is_file():
            return None
        tag = self._latest.read_text(encoding="utf-8").strip()  # a user may have written it
        try:
            return Position(**json.loads((self.checkpoints / tag / "state.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise self._damaged(tag) from None

    def finished(self, recipe: Recipe) -> bool:
        """Whether the last step was made and the trained heads were written.

        Raises:
            RecipeError: the run was started with another recipe (the message names all relevant differences), or its
                recipe is missing.
        """
        position = self.position()
        if position is None:
            return False
        if not self._recipe.is_file():
            raise RecipeError(
                f"run directory ({self.path}) has checkpoints and no recipe.yaml; copy the whole directory"
            )
        try:
            changed = differences(recipe, read_yaml(self._recipe))
        except (OSError, ValueError, AttributeError, TypeError):  # no YAML, or not of a recipe's form
            raise RecipeError(
                f"recipe ({self._recipe}) is damaged; copy it from a backup, or give another directory (--recipe.run"
                " DIR)"
            ) from None
        if changed:
            raise RecipeError(
                f"run directory ({self.path}) holds a run of another recipe:\n  "
                + "\n  ".join(changed)
                + "\ngive another directory (--recipe.run DIR), restore these values, or delete the directory"
            )
        return position.step == position.total and self._holds_heads_of(recipe, position)

    def _holds_heads_of(self, recipe: Recipe, position: Position) -> bool:
        """Whether heads/ is whole and of this run: an earlier one may have left others."""
        origin = peek_object(self.heads / "provenance.json") or {"recipe": {}, "data": {}}
        same = origin["data"].get("fingerprint") == position.data and not differences(recipe, origin["recipe"])
        return same and (self.heads / "config.json").is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory; the lock ends with the process, however it ends.

        Unfinished files of a killed run are removed; a checkpoint that `latest` does not name stays.

        Raises:
            BlockingIOError: another process trains here.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(
                    f"run directory ({self.path}) is in use by another process; wait for it, stop it, or give another "
                    "directory (--recipe.run DIR)"
                ) from None
            for place in (self.path, self.checkpoints, self.heads, self.best):
                sweep(place, ".*.tmp*", age=0)
            sweep(self.checkpoints, ".step-*", age=0)
            yield

    def start(self, recipe: Recipe, step: int) -> None:
        """Write the resolved recipe, and remove the metrics of later steps and of the run's end."""
        kept = [json.dumps(record) for record in self.records() if record["step"] <= step and "steps" not in record]
        with self.writing():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            _replace(self._recipe, yaml.safe_dump(asdict(recipe), sort_keys=False))
            _replace(self._metrics, "".join(f"{line}\n" for line in kept))

    def records(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl."""
        found: list[dict[str, Any]] = []
        for line in self._metrics.read_text(encoding="utf-8").splitlines() if self._metrics.is_file() else []:
            with suppress(json.JSONDecodeError):  # an incomplete last line
                found.append(json.loads(line))
        return found

    def last_record(self) -> dict[str, Any]:
        """The last complete line of metrics.jsonl, read from the end; {} = there is none, or it is very long."""
        if not self._metrics.is_file():
            return {}
        with self._metrics.open("rb") as file:
            file.seek(max(0, self._metrics.stat().st_size - TAIL))
            lines = file.read().split(b"\n")[:-1]
        with suppress(IndexError, json.JSONDecodeError, UnicodeDecodeError):
            return dict(json.loads(lines[-1]))
        return {}

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with self.writing(), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, position: Position, tensors: Mapping[str, "Tensor"], keep: int) -> None:
        """Write a checkpoint, make it the newest one, and delete all but the last `keep`.

        Raises:
            OSError: the disk is full or gone; the previous checkpoint is intact and still the newest.
        """
        from safetensors.torch import save_file

        final, temporary = self.checkpoints / position.tag, self.checkpoints / f".{position.tag}"
        for leftover in (final, temporary):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            with self.writing():
                temporary.mkdir(parents=True)
                save_file(dict(tensors), temporary / "checkpoint.safetensors")
                (temporary / "state.json").write_text(json.dumps(asdict(position)), encoding="utf-8")
                for path in (*temporary.iterdir(), temporary):
                    _sync(path)
                temporary.rename(final)
                _replace(self._latest, position.tag)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # files from before the disk was full
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        steps = sorted(int(name) for name in names if name.isdecimal())  # a user may have copied one
        kept = [step for step in steps if step <= position.step][-keep:]  # later ones are of steps that are made again
        for step in set(steps) - set(kept):
            shutil.rmtree(self.checkpoints / f"step-{step}")

    def end_at(self, position: Position) -> None:
        """Make the newest checkpoint the last one of a run that ends early; its tensors stay."""
        with self.writing():
            _replace(self.checkpoints / position.tag / "state.json", json.dumps(asdict(position)))

    def tensors(self, position: Position) -> dict[str, "Tensor"]:
        """The tensors that `save` wrote.

        Raises:
            ValueError: the file is damaged.
        """
        from safetensors.torch import load_file

        try:
            return load_file(self.checkpoints / position.tag / "checkpoint.safetensors")
        except (OSError, SafetensorError):
            raise self._damaged(position.tag) from None

    def writing(self) -> AbstractContextManager[None]:
        """See `disk_errors_named`, for files of this directory."""
        return disk_errors_named(f"run directory ({self.path})")

    def _damaged(self, tag: str) -> ValueError:
        return ValueError(
            f"checkpoint ({self.checkpoints / tag}) is damaged; write the name of another one into {self._latest}, or "
            f"delete {self.path} to start again"
        )


@contextmanager
def disk_errors_named(what: str) -> Iterator[None]:
    """Turn errors of writing `what` into one sentence.

    Raises:
        OSError: says what to do.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2].partition(";")[0]
        raise OSError(
            f"{what} cannot be written: {reason}; make room for it, then the same command continues from the last "
            "checkpoint"
        ) from error


def _replace(path: Path, text: str) -> None:
    replace_text(path, text)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
