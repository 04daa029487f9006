"""Whole runs on two processes: agreement of ZeRO stages and numbers of processes, and what else torchrun changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.jobs import ROOT, assert_same_run, finish, flags, launch, metrics, run, train, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]

SEVERAL = """
import json, sys
sys.modules["matplotlib"] = None
from medusa.train.__main__ import main
for arguments in json.loads(sys.argv[1]):
    assert main(arguments) == 0
"""
"""Start-up costs most of a tiny run: several of them in one."""
KINDS = {"medusa": 0, "recurrent": 0, "hydra": 11}
"""Architectures, and how many tokens they can draft (0 = all)."""
SHAPES = {
    "medusa": [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)],
    "recurrent": [(3, False), (2, True)], "hydra": [(1, False), (3, True)],
}  # fmt: skip
"""ZeRO stages, and whether they offload, on two processes."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, base: Path, samples: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe") / "recipe.yaml", base, samples, {"optim": {"steps": 6}})


def test_stages_offload_and_numbers_of_processes_agree(recipe: Path, tmp_path: Path) -> None:
    script, runs = tmp_path / "several.py", []
    script.write_text(SEVERAL, encoding="utf-8")
    for architecture, shapes in SHAPES.items():
        heads = {
            "heads.own_lm_heads": True, "heads.architecture": architecture, "heads.draft_vocab": KINDS[architecture],
        }  # fmt: skip
        assert run(recipe, tmp_path / architecture, **heads, **{"engine.zero_stage": 0}) == 0
        for stage, offload in shapes:
            values = heads | {"engine.zero_stage": stage, "engine.offload": offload}
            directory = tmp_path / f"{architecture}-{stage}-{offload}"
            runs.append(["--recipe", str(recipe), *flags(**{"run": directory, **values})])
    finish(launch([str(script), json.dumps(runs)]))
    for architecture, shapes in SHAPES.items():
        first, *_, last, _ = metrics(tmp_path / architecture)
        assert last["loss"] < first["loss"] - 0.1
        for stage, offload in shapes:
            assert_same_run(tmp_path / f"{architecture}-{stage}-{offload}", tmp_path / architecture, tolerance=1e-5)


def test_a_sharded_base_gives_the_same_run(recipe: Path, heldout: Path, tmp_path: Path) -> None:
    values = {
        "data.heldout": heldout, "evaluate.rows": 9, "evaluate.prompts": 2, "evaluate.max_new_tokens": 8,
        "heads.architecture": "recurrent", "heads.draft_vocab": 40, "optim.rows_per_step": 5, "optim.micro_rows": 1,
        "optim.loss": "kl",
    }  # fmt: skip
    assert run(recipe, tmp_path / "whole", **values) == 0
    said = finish(train(recipe, tmp_path / "sharded", values | {"base.shard": True}))
    assert "a base divided among processes" in said
    assert_same_run(tmp_path / "sharded", tmp_path / "whole", tolerance=1e-5)
    ours, theirs = metrics(tmp_path / "sharded")[-1], metrics(tmp_path / "whole")[-1]
    assert ours["heldout_top5"] == pytest.approx(theirs["heldout_top5"])
    assert ours["heldout_samples"] == theirs["heldout_samples"]
    assert theirs.keys() - ours.keys() == {"heldout_tokens_per_step", "heldout_acceptance"}


def test_an_error_of_one_process_is_told_once(recipe: Path, tmp_path: Path) -> None:
    said = finish(train(recipe, tmp_path, {"data.train": "none.jsonl"}), status=2)
    assert said.count("sample file (none.jsonl) does not exist") == 1
    (empty := tmp_path / "empty.jsonl").touch()
    said = finish(train(recipe, tmp_path, {"data.train": str(empty)}), status=1)
    assert said.count(f"sample file ({empty}) is empty") == 1
    assert "ChildFailedError" not in said
    said = finish(train(recipe, tmp_path, {"optim.rows_per_step": 1}), status=2)
    assert said.count("optim.rows_per_step (1) leaves some of the processes (2) without a row") == 1


def test_wandb_offline_writes_under_the_run_directory_only(recipe: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    arguments = ["--recipe", str(recipe), "--recipe.run", str(tmp_path / "run"), "--recipe.optim.steps", "2"]
    environment = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["MPLCONFIGDIR"] = str(tmp_path / "fonts")  # as launch.sh sets it: the report is drawn by matplotlib
    subprocess.run(
        [sys.executable, "-m", "medusa.train", *arguments, "--recipe.log.wandb", "offline"],
        cwd=ROOT, env=environment, check=True, timeout=400,
    )  # fmt: skip
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert not list(home.rglob("*"))
