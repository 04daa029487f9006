"""Experiment trackers beside metrics.jsonl: Weights & Biases and TensorBoard.

metrics.jsonl is the reference, and a tracker is a copy of it. After a restart a run repeats the steps since its last
checkpoint. So a tracker names the first step that it lacks, gets the missing steps from metrics.jsonl, and skips
repeated ones. No step is lost and none is doubled, however the run ended.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from medusa.train.config import Recipe
from medusa.train.run_directory import RunDirectory

LOGGER = logging.getLogger("medusa.train")
START_SECONDS = 90.0
"""Longest wait for the Weights & Biases server at the start."""


class Trackers:
    """The trackers that a recipe asks for, on process 0; a context that closes them.

    Each has a recipe key that switches it on (`name`), the first step that it lacks (`first`), `log` and `close`.

    A tracker that cannot be started ends the run, since nothing is lost yet. One that fails later is dropped with a
    warning; training continues, and the next start sends it the missing steps.

    Args:
        recipe: log.wandb, log.wandb_project and log.tensorboard.
        directory: the run directory.
        shown: False on the other processes, which have no trackers.

    Raises:
        ValueError: a tracker cannot be started.
    """

    def __init__(self, recipe: Recipe, directory: RunDirectory, shown: bool) -> None:
        self._trackers: list[Wandb | TensorBoard] = []
        if not shown:
            return
        position = directory.position()
        step = 0 if position is None else position.step
        if recipe.log.wandb != "off":
            self._trackers.append(Wandb(recipe, directory.path))
        if recipe.log.tensorboard:
            self._trackers.append(TensorBoard(directory.path / "tensorboard", step + 1))
        if self._trackers:
            for record in directory.records():
                if record["step"] <= step:
                    self.log(record)

    def log(self, record: Mapping[str, Any], more: bool = False) -> None:
        """Send one record of metrics.jsonl; lists become one curve per head.

        Args:
            record: the record.
            more: whether these are more figures of a step that is known: those of the run's end, or of an evaluation.
        """
        values = _flat(record)
        for tracker in list(self._trackers):
            if more or record["step"] >= tracker.first:
                self._guarded(tracker, partial(tracker.log, values, record["step"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for tracker in list(self._trackers):
            self._guarded(tracker, partial(tracker.close, done=kind is None))

    def _guarded(self, tracker: "Wandb | TensorBoard", action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, it must not end a training run
            LOGGER.warning("%s failed and is dropped: %s; metrics.jsonl is still written", tracker.name, error)
            self._trackers.remove(tracker)


class Wandb:
    """Weights & Biases.

    A restarted run keeps its id. Online it is resumed, and the server says which step it lacks (steps must increase
    there, and it drops repeated ones). Offline nothing can be resumed, and each start writes its own folder. It gets
    the whole run again and replaces the previous folders, so `wandb sync` finds one folder with every step once.

    Args:
        recipe: the mode and the project.
        directory: the run directory; all files go there.

    Raises:
        ValueError: wandb is not installed, no login is known, or the server does not answer.
    """

    name = "log.wandb"

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        mode: Any = recipe.log.wandb
        for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(variable, str(directory.resolve()))  # nothing is written outside the run directory
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb
        except ImportError:
            raise _missing(self.name, mode, "wandb", "off") from None
        known = directory / "wandb-id"  # created at the first start
        if not known.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            known.write_text(secrets.token_hex(4), encoding="utf-8")
        run_id = known.read_text(encoding="utf-8")
        if mode == "offline":
            for folder in directory.glob(f"wandb/offline-run-*-{run_id}"):
                shutil.rmtree(folder, ignore_errors=True)
        elif not wandb.login(prompt=False, verify=False):
            raise ValueError(
                f"{self.name} ({mode}) finds no login; run `wandb login`, set WANDB_API_KEY, or take offline or off"
            )
        try:
            self._run = wandb.init(
                project=recipe.log.wandb_project,
                name=directory.name,
                id=run_id,
                resume="allow" if mode == "online" else None,
                mode=mode,
                dir=str(directory),
                config=asdict(recipe),
                settings=wandb.Settings(init_timeout=START_SECONDS),
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.name} ({mode}) cannot be started: {reason}; check network and login, or set it to offline"
            ) from error
        self.first = self._run.starting_step

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send one step; more figures of a step get an additional one if it is already on the server."""
        self._run.log(dict(values), step=max(step, self._run.step))

    def close(self, done: bool) -> None:
        """Upload pending data; a run that is not done is marked as failed until it is resumed."""
        self._run.finish(exit_code=0 if done else 1)


class TensorBoard:
    """TensorBoard files; points of an earlier start for steps that are now repeated are marked as void.

    Args:
        directory: the directory of the files.
        step: the next step.

    Raises:
        ValueError: the package tensorboard is not installed.
    """

    name = "log.tensorboard"

    def __init__(self, directory: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing(self.name, "true", "tensorboard", "false") from None
        known = any(directory.glob("events.*"))
        self.first = step if known else 0
        self._writer = SummaryWriter(str(directory), purge_step=step if known else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write one point per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, done: bool) -> None:
        """Write pending points."""
        self._writer.close()


def _missing(key: str, value: str, package: str, remedy: str) -> ValueError:
    return ValueError(f"{key} ({value}) needs the package {package}; pip install {package}, or set {key} to {remedy}")


def _flat(record: Mapping[str, Any]) -> dict[str, float]:
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    heads = {f"{name}/{head}": value for name, values in lists.items() for head, value in enumerate(values, start=1)}
    return {name: value for name, value in record.items() if isinstance(value, int | float)} | heads
