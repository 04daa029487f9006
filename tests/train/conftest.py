"""The tiny base as a directory, samples for it, and an environment that no run changes for the next test."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from train.trainer import Trainer


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def base(base_directory: Path) -> Path:
    return base_directory


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 conversations whose answers repeat, so that heads have something to learn."""
    return _conversations(tmp_path_factory.mktemp("samples") / "train.jsonl", range(64))


@pytest.fixture(scope="session")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 others of their kind."""
    return _conversations(tmp_path_factory.mktemp("heldout") / "heldout.jsonl", range(64, 128))


def _conversations(path: Path, numbers: range) -> Path:
    records = [{"prompt": f"say {n}", "response": f"{n} " * (3 + n % 7) + "abcdefgh " * 3} for n in numbers]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


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
