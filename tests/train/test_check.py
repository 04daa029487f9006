"""All mistakes of a recipe are told in one go, before anything is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from medusa.train.__main__ import main
from medusa.train.check import mistakes
from medusa.train.config import OptimRecipe
from medusa.train.recipe_file import build_recipe, read_recipe
from medusa.train.schedule import doubts
from tests.train.jobs import write_recipe


def _told(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    assert main([*words, "--check"]) == 2
    return caplog.messages[-1].splitlines()


def test_all_mistakes_are_told_together(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"data": {"heldout": "nix.jsonl", "row_tokens": 300}, "heads": {"num_heads": 0, "draft_vocab": 9999}}
    path = write_recipe(tmp_path / "r.yaml", base, tmp_path / "nothing.jsonl", sections)
    told = _told(caplog, "--recipe", str(path))
    assert [line.split(maxsplit=1)[0].rstrip(":") for line in told] == [
        "heads.num_heads", "data.row_tokens", "heads.draft_vocab", "data.train", "data.heldout",
    ]  # fmt: skip
    assert told[1] == f"data.row_tokens (300) is more than the context of the base (256, {base}); lower it"
    monkeypatch.setenv("NODE_RANK", "1")
    assert not [line for line in _told(caplog, "--recipe", str(path)) if "heldout" in line], "another machine reads it"
    told = _told(caplog, "--recipe", str(path), "--recipe.base.name", "./no/such")
    assert "base.name: base directory (./no/such) does not exist; give another path, or a Hub id" in told


def test_layers_are_counted_as_the_family_calls_them(tmp_path: Path, samples: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_positions": 64}))
    values = {"base.name": str(tmp_path), "data.train": str(samples), "run": str(tmp_path / "run")}
    keys = {"heads.feature_layers": 2, "data.row_tokens": 65}
    told = list(mistakes(build_recipe(values | keys)))
    assert [line.split()[0] for line in told] == ["data.row_tokens", "heads.feature_layers"]
    assert not list(mistakes(build_recipe(values | {"heads.feature_layers": 1, "data.row_tokens": 64})))


def test_a_share_of_no_heads_is_a_mistake(base: Path, samples: Path) -> None:
    values = {"base.name": str(base), "data.train": str(samples), "data.row_tokens": 64, "heads.init_share": 0.5}
    assert [line.split()[0] for line in mistakes(build_recipe(values))] == ["heads.init_share"]
    assert not list(mistakes(build_recipe(values | {"heads.init_from": "some/heads"})))
    wrong = values | {"heads.init_from": "./no/such", "heads.architecture": "block", "heads.mask_token": 257}
    assert [line.split(" (")[0] for line in mistakes(build_recipe(wrong))] == ["heads.mask_token", "heads.init_from"]


def test_patience_needs_evaluations_and_a_frozen_base(base: Path, samples: Path, heldout: Path) -> None:
    values = {"base.name": str(base), "data.train": str(samples), "data.row_tokens": 64, "evaluate.patience": 2}
    evaluated = values | {"data.heldout": str(heldout), "evaluate.every_steps": 5}
    assert "needs evaluations" in "".join(mistakes(build_recipe(values)))
    assert "give one of the two" in "".join(mistakes(build_recipe(evaluated | {"lora.rank": 4})))
    assert not list(mistakes(build_recipe(evaluated)))


def test_the_run_directory_of_another_recipe_is_a_mistake(
    finished: Path, recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ["--recipe", str(recipe), "--recipe.run", str(finished)]
    assert main([*run, "--check"]) == 0
    assert "holds a run of another recipe" in _told(caplog, *run, "--recipe.optim.lr", "0.5")[0]


def test_one_process_of_a_machine_checks_under_torchrun(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa.train.__main__.die_with_parent", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    words = ["--recipe", str(write_recipe(tmp_path / "r.yaml", base, tmp_path / "nothing.jsonl", {}))]
    assert "data.train: sample file" in _told(caplog, *words)[0]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main([*words, "--check"]) == 0


def test_directories_that_cannot_be_written_are_mistakes(tmp_path: Path, base: Path, samples: Path) -> None:
    (tmp_path / "file").touch()
    values = {"base.name": str(base), "data.train": str(samples), "data.row_tokens": 64}
    values |= {"run": str(tmp_path / "file/run"), "data.cache": str(tmp_path / "file"), "cache.directory": "file"}
    assert list(mistakes(build_recipe(values))) == [
        f"{key} ({values[key]}) cannot be written: {tmp_path / 'file'} is a file; give another directory"
        for key in ("run", "data.cache")
    ]
    values |= {"run": str(tmp_path / "a/b"), "data.cache": str(tmp_path), "cache.mode": "hybrid"}
    assert not list(mistakes(build_recipe(values)))
    values["cache.directory"] = str(tmp_path / "file")
    assert [line.split()[0] for line in mistakes(build_recipe(values))] == ["cache.directory"]


def test_a_check_loads_no_torch_and_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    code = "import sys; from train.__main__ import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = ["--recipe", str(recipe), "--recipe.run", str(tmp_path / "run"), "--check"]
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("optim", "rows", "said"),
    [
        ({"rows_per_step": 16}, 160, []),
        ({"rows_per_step": 16, "epochs": 2.0}, 165, []),
        ({"rows_per_step": 16}, 3,
         ["optim.epochs (1.0) cannot be reached: 1 steps of 16 rows are 5.33 epochs of 3 rows"]),
        ({"rows_per_step": 4, "steps": 6}, 12, []),
        ({"rows_per_step": 4, "steps": 6, "epochs": 3.0}, 12,
         ["optim.epochs (3.0) is ignored, since optim.steps is given: 6 steps of 4 rows are 2 epochs of 12 rows"]),
    ],
)  # fmt: skip
def test_steps_and_epochs_that_cannot_be_had_are_told(optim: dict, rows: int, said: list[str]) -> None:
    told = list(doubts(OptimRecipe(**optim), rows))
    assert [line.partition("; ")[0] for line in told] == said


@pytest.mark.usefixtures("no_pictures")
def test_training_tells_them(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from medusa.train.stop import StopRequest
    from medusa.train.trainer import train

    values = {"run": str(tmp_path / "run"), "optim.steps": "1", "optim.epochs": "4", "evaluate.prompts": "0"}
    made = read_recipe(recipe, values)
    with caplog.at_level("WARNING", "medusa.train"):
        train(made, StopRequest())
    assert "optim.epochs (4.0) is ignored, since optim.steps is given" in caplog.text
