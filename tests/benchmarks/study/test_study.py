"""The whole command on a tiny base: what it writes, that it goes on where it was, and what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.study.__main__ import main
from tests.train.jobs import ROOT, until, write_recipe

VARIANTS = "base-line: {heads.architecture: medusa}\nother: {heads.architecture: recurrent, optim.loss: kl}\n"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, base_directory: Path, samples: Path) -> list[str]:
    """Of a study of two designs; without --out."""
    folder = tmp_path_factory.mktemp("inputs")
    sections = {"optim": {"steps": 6}, "log": {"checkpoint_steps": 2}}
    recipe = write_recipe(folder / "recipe.yaml", base_directory, samples, sections)
    (folder / "variants.yaml").write_text(VARIANTS)
    for name in ("train", "heldout"):
        shutil.copy(samples, folder / f"{name}.jsonl")
    words = f"--recipe {recipe} --variants {folder / 'variants.yaml'} --data {folder} --seeds 1 --prompts 4 --nodes 4 8"
    return [*words.split(), "--max-new-tokens", "16", "--speed-prompts", "1", "--rounds", "1"]


@pytest.mark.slow
def test_a_study_that_is_stopped_goes_on(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (tmp_path / "runs" / name / "seed-0" for name in ("base-line", "other"))
    command = [sys.executable, "-m", "benchmarks.study", "--out", str(tmp_path), "--processes", "1", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    study = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    until((second / "study.log").exists)
    study.send_signal(signal.SIGTERM)
    _, errors = study.communicate(timeout=60)
    assert study.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by SIGTERM" in errors
    assert "Traceback" not in errors
    assert (first / "evaluation.json").is_file()
    assert not (tmp_path / "report.json").exists()
    trained = (first / "heads" / "heads.safetensors").stat().st_mtime_ns

    assert main(["--out", str(tmp_path), *flags]) == 0
    assert (first / "heads" / "heads.safetensors").stat().st_mtime_ns == trained
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["figures"]) == list(report["variants"]) == ["base-line", "other"]
    for figures in report["figures"].values():
        assert figures["0.0"]["tokens_per_step"]["dynamic 8"]["value"] >= 1.0
        assert len(figures["1.0"]["acceptance"]) == 3
    assert set(report["speed"]["other"]) == {"dynamic 4", "dynamic 8"}
    assert (tmp_path / "report.md").read_text() in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == 3

    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    assert main(["--out", str(tmp_path), *flags]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["figures"] == report["figures"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == written, "nothing ran again"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--seeds 0", "at least 1"),
        ("--nodes 1", "at least 2"),
        ("--only nothing", "variant (nothing) is not in"),
        ("--recipe.optim.speed 3", "unknown key optim.speed"),
        ("--sedes 2", "argument (--sedes) is unknown"),
        ("--recipe nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_wrong_use_is_one_message(
    flags: list[str], tmp_path: Path, wrong: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["--out", str(tmp_path / "out"), *flags, *wrong.split()])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_texts_are_one_message(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.json").write_text("{")
    assert main(["--out", str(tmp_path), *flags]) == 1
    assert "texts.json) are damaged; delete the file" in capsys.readouterr().err
