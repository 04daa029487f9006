import json
from dataclasses import replace
from pathlib import Path

import pytest

from train.recipe_file import RecipeError, build_recipe
from train.run_directory import Position, RunDirectory

RECIPE = build_recipe({"data.train": "x.jsonl"})


def _position(step: int) -> Position:
    return Position(step=step, total=10, world_size=2, data="abc")


def _checkpoint(directory: RunDirectory, step: int, keep: int = 2) -> None:
    folder = directory.checkpoints / f"step-{step}"
    folder.mkdir()
    (folder / "weights").write_text("w", encoding="utf-8")
    directory.commit(_position(step), keep)


def test_the_newest_checkpoint_is_named_and_older_ones_are_pruned(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.position() is None
    directory.start(RECIPE, 0)
    for step in (5, 9, 10):
        _checkpoint(directory, step)
    assert directory.position() == _position(10)
    assert sorted(path.name for path in directory.checkpoints.glob("step-*")) == ["step-10", "step-9"]


def test_a_checkpoint_that_was_not_committed_does_not_count(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.start(RECIPE, 0)
    _checkpoint(directory, 5)
    (directory.checkpoints / "step-9").mkdir()
    assert directory.position() == _position(5)
    directory.discard("step-9")
    assert not (directory.checkpoints / "step-9").exists()


def test_metrics_are_cut_to_the_resumed_step(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.start(RECIPE, 0)
    for step in (1, 2, 3):
        directory.log({"step": step})
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')  # the process died here
    directory.start(RECIPE, 2)
    directory.log({"step": 3})
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_another_recipe_is_refused_once_there_is_a_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    other = replace(RECIPE, optim=replace(RECIPE.optim, lr=0.5), log=replace(RECIPE.log, keep=9))
    directory.start(RECIPE, 0)
    directory.check(other)
    _checkpoint(directory, 5)
    directory.check(RECIPE)
    with pytest.raises(RecipeError, match=r"optim\.lr is 0\.5") as caught:
        directory.check(other)
    assert "log.keep" not in str(caught.value)


def test_finished_needs_the_last_step_and_the_heads(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.start(RECIPE, 0)
    directory.heads.mkdir()
    (directory.heads / "config.json").write_text("{}", encoding="utf-8")
    assert not directory.finished()
    _checkpoint(directory, 5)
    assert not directory.finished()
    _checkpoint(directory, 10)
    assert directory.finished()
