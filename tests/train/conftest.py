"""The tiny base as a directory, a short run, and runs in which something happens before a step."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from medusa.train.trainer import Trainer
from tests.train.jobs import run, write_recipe


@pytest.fixture(scope="session")
def base(base_directory: Path) -> Path:
    return base_directory


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory, base: Path, samples: Path, heldout: Path) -> Path:
    """Nine steps, with a checkpoint at every fourth and an evaluation at the sixth and the last."""
    sections = {
        "data": {"heldout": str(heldout)},
        "optim": {"steps": 9, "rows_per_step": 4},
        "evaluate": {"prompts": 2, "max_new_tokens": 8, "nodes": 4, "every_steps": 6},
        "log": {"checkpoint_steps": 4},
    }
    return write_recipe(tmp_path_factory.mktemp("recipe") / "recipe.yaml", base, samples, sections)


@pytest.fixture(scope="session")
def finished(recipe: Path) -> Path:
    """The run directory of that recipe."""
    with without_pictures():
        assert run(recipe, recipe.parent / "run") == 0
    return recipe.parent / "run"


@contextmanager
def without_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """As on a machine without matplotlib: drawing a run's curves takes longer than training on a tiny base."""
    with without_pictures():
        yield


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[None]]:
    """Runs inside it do something when they are about to make the step after the given one."""
    train_step = Trainer.train_step

    @contextmanager
    def acting(step: int, act: Callable[[], object]) -> Iterator[None]:
        def patched(trainer: Trainer) -> dict[str, Any]:
            if trainer.step == step:
                act()
            return train_step(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", patched)
            yield

    return acting


@pytest.fixture
def interrupted_at(
    before_step: Callable[..., AbstractContextManager[None]],
) -> Callable[[int], AbstractContextManager[None]]:
    """Runs inside it are interrupted, as by Ctrl-C, when they are about to make the step after the given one."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    return lambda step: before_step(step, interrupt)
