"""The tiny base as a directory, and runs that are interrupted."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from train.trainer import Trainer


@pytest.fixture(scope="session")
def base(base_directory: Path) -> Path:
    return base_directory


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """As on a machine without matplotlib: drawing a run's curves takes longer than training on a tiny base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """Runs inside it are interrupted, as by Ctrl-C, when they are about to make the step after the given one."""
    train_step = Trainer.train_step

    @contextmanager
    def interrupting(step: int) -> Iterator[None]:
        def interrupted(trainer: Trainer) -> dict[str, Any]:
            if trainer.step == step:
                raise KeyboardInterrupt
            return train_step(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", interrupted)
            yield

    return interrupting
