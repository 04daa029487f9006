import json
import resource
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from medusa.files import write_json
from medusa.train.recipe_file import RecipeError, build_recipe
from medusa.train.run_directory import Position, RunDirectory

RECIPE = build_recipe({"data.train": "x.jsonl"})
TENSORS = {"parameter/a": torch.arange(3.0), "steps": torch.tensor(5)}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run that has begun."""
    directory = RunDirectory(tmp_path / "run")
    directory.start(RECIPE, 0)
    return directory


def _position(step: int) -> Position:
    return Position(step=step, total=10, seconds=1.5, data="abc")


def _save(directory: RunDirectory, *steps: int, keep: int = 2) -> None:
    for step in steps:
        directory.save(_position(step), TENSORS, keep)


def _checkpoints(directory: RunDirectory) -> list[str]:
    return sorted(path.name for path in directory.checkpoints.iterdir())


def test_the_newest_checkpoint_is_named_and_older_ones_are_pruned(directory: RunDirectory) -> None:
    assert directory.position() is None
    _save(directory, 5, 9, 10)
    assert directory.position() == _position(10)
    assert _checkpoints(directory) == ["latest", "step-10", "step-9"]
    read = directory.tensors(_position(10))
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_a_copy_of_a_checkpoint_is_left_alone(directory: RunDirectory) -> None:
    _save(directory, 5, 9)
    shutil.copytree(directory.checkpoints / "step-9", directory.checkpoints / "step-9.bak")
    _save(directory, 10, 11, 12)
    assert "step-9.bak" in _checkpoints(directory)


def test_a_checkpoint_of_a_later_step_goes_before_the_newest_one(directory: RunDirectory) -> None:
    _save(directory, 5)
    (directory.checkpoints / "step-9").mkdir()  # as if it had died before it wrote `latest`
    _save(directory, 7, keep=1)
    assert directory.position() == _position(7)
    assert torch.equal(directory.tensors(_position(7))["steps"], TENSORS["steps"])
    assert _checkpoints(directory) == ["latest", "step-7"]


def test_a_checkpoint_that_was_not_finished_does_not_count(directory: RunDirectory) -> None:
    _save(directory, 5)
    (directory.checkpoints / ".step-9").mkdir()  # as if it had died while it wrote the tensors
    (directory.checkpoints / "step-9").mkdir()  # or before it wrote `latest`
    assert directory.position() == _position(5)
    _save(directory, 9)
    assert directory.position() == _position(9)
    assert _checkpoints(directory) == ["latest", "step-5", "step-9"]


def test_a_run_that_ends_early_keeps_the_tensors_of_its_newest_checkpoint(directory: RunDirectory) -> None:
    _save(directory, 5)
    tensors = directory.checkpoints / "step-5/checkpoint.safetensors"
    written = tensors.stat()
    directory.end_at(replace(_position(5), total=5))
    assert directory.position() == replace(_position(5), total=5)
    assert (tensors.stat().st_ino, tensors.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


@pytest.mark.parametrize("room", [0, 100, 300])
def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint(directory: RunDirectory, room: int) -> None:
    _save(directory, 5)
    said = r"run directory \(.*\) cannot be written: File too large.*; make room for it"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # writes beyond it fail as those to a full disk do
    try:
        with pytest.raises(OSError, match=said):
            directory.save(_position(9), TENSORS | {"more": torch.zeros(1000)}, keep=1)
        if room == 0:
            with pytest.raises(OSError, match="cannot be written"):
                directory.log({"step": 6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _checkpoints(directory) == ["latest", "step-5"]
    assert torch.equal(directory.tensors(_position(5))["parameter/a"], TENSORS["parameter/a"])


def test_a_place_without_room_is_named_with_one_remedy(directory: RunDirectory) -> None:
    (directory.path / "file").touch()
    said = r"run directory \(.*file/run\) cannot be written: Not a directory; make room"
    with pytest.raises(OSError, match=said), RunDirectory(directory.path / "file/run").locked():
        pass
    with (
        pytest.raises(OSError, match=r"cannot be written: no space; make room for it, then [^;]*$"),
        directory.writing(),
    ):
        raise OSError("heads file (best) cannot be written: I/O error: no space; make room, or give another directory")


def test_a_damaged_checkpoint_is_named(directory: RunDirectory) -> None:
    _save(directory, 5)
    tensors = directory.checkpoints / "step-5" / "checkpoint.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"step-5.* is damaged"):
        directory.tensors(_position(5))
    (directory.checkpoints / "step-5" / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"step-5.* is damaged"):
        directory.position()


def test_metrics_are_cut_to_the_resumed_step(directory: RunDirectory) -> None:
    for step in (1, 2, 3):
        directory.log({"step": step})
    metrics = directory.path / "metrics.jsonl"
    with metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')  # the process died here
    directory.start(RECIPE, 2)
    directory.log({"step": 3})
    assert [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()] == [1, 2, 3]


def test_the_end_of_a_run_whose_heads_were_not_written_is_logged_once(directory: RunDirectory) -> None:
    last = {"step": 2, "steps": 2, "heldout_top1": [0.5]}
    for _ in range(2):
        directory.start(RECIPE, 2)
        directory.log(last)
    assert directory.records() == [last]


def test_another_recipe_is_refused_once_there_is_a_checkpoint(directory: RunDirectory) -> None:
    other = replace(RECIPE, optim=replace(RECIPE.optim, lr=0.5), log=replace(RECIPE.log, keep=9))
    assert not directory.finished(other)
    _save(directory, 5)
    assert not directory.finished(RECIPE)
    with pytest.raises(RecipeError, match=r"optim\.lr is 0\.5") as caught:
        directory.finished(other)
    assert "log.keep" not in str(caught.value)
    (directory.path / "recipe.yaml").unlink()
    with pytest.raises(RecipeError, match=r"has checkpoints and no recipe\.yaml; copy the whole directory"):
        directory.finished(RECIPE)


def test_finished_needs_the_last_step_and_the_heads(directory: RunDirectory) -> None:
    directory.heads.mkdir()
    (directory.heads / "config.json").write_text("{}", encoding="utf-8")
    assert not directory.finished(RECIPE)
    _save(directory, 5)
    assert not directory.finished(RECIPE)
    _save(directory, 10)
    other = replace(RECIPE, optim=replace(RECIPE.optim, lr=0.5))
    for recipe, samples, whole in ((other, "abc", False), (RECIPE, "abd", False), (RECIPE, "abc", True)):
        write_json(directory.heads / "provenance.json", {"recipe": asdict(recipe), "data": {"fingerprint": samples}})
        assert directory.finished(RECIPE) is whole, "an earlier run may have left its heads"


def test_latest_may_be_written_by_hand(directory: RunDirectory) -> None:
    _save(directory, 5, 9)
    (directory.checkpoints / "latest").write_text("step-5\n")  # echo step-5 > latest, as the error about step-9 says
    assert directory.position() == _position(5)
    assert directory.finished(RECIPE) is False


def test_what_a_killed_run_left_is_removed_by_the_next_that_holds_the_directory(directory: RunDirectory) -> None:
    _save(directory, 5)
    kept = sorted(path for path in directory.path.rglob("*") if path.is_file())
    directory.heads.mkdir()
    names = (".metrics.jsonl.tmp99", "checkpoints/.latest.tmp1", "heads/.config.json.tmp7")
    (directory.checkpoints / ".step-9").mkdir()
    for name in (*names, "checkpoints/.step-9/checkpoint.safetensors"):
        (directory.path / name).write_text("half")
    with directory.locked():
        assert sorted(path for path in directory.path.rglob("*") if path.is_file() and path.name != ".lock") == kept
        assert not (directory.checkpoints / ".step-9").exists()
        of_the_live_run = directory.path / names[0]
        of_the_live_run.write_text("half")
        with pytest.raises(BlockingIOError), RunDirectory(directory.path).locked():
            pass
        assert of_the_live_run.exists()


@pytest.mark.parametrize("text", ["", "hello", "heads: [", "\xff"])
def test_a_damaged_recipe_is_named(directory: RunDirectory, text: str) -> None:
    _save(directory, 5)
    (directory.path / "recipe.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecipeError, match=r"recipe \(.*recipe\.yaml\) is damaged; copy it from a backup"):
        directory.finished(RECIPE)
