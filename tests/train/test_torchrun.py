"""Two processes under torchrun: SIGKILL and resume, and the agreement of the ZeRO stages."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medusa.formats.native import load_heads

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, base: Path, samples: Path) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    values = {
        "base": {"name": str(base), "dtype": "float32"},
        "heads": {"num_heads": 3},
        "data": {"train": str(samples), "row_tokens": 96},
        "optim": {"lr": 0.01, "rows_per_step": 8, "micro_rows": 2, "steps": 40},
        "engine": {"device": "cpu"},
        "log": {"checkpoint_steps": 7},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def _start(recipe: Path, run: Path, *flags: str) -> "subprocess.Popen[bytes]":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "train.launch", "--nproc_per_node=2", f"--master_port={port}"]
    arguments = ["-m", "train", "--recipe", str(recipe), "--recipe.run", str(run), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE)


def _finish(process: "subprocess.Popen[bytes]") -> str:
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors.decode()
    return errors.decode()


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _assert_same_run(run: Path, reference: Path, tolerance: float) -> None:
    for ours, theirs in zip(_metrics(run), _metrics(reference), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=tolerance)
    expected = load_heads(reference / "heads").state_dict()
    for name, value in load_heads(run / "heads").state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


def _workers(process: "subprocess.Popen[bytes]") -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text(encoding="utf-8").split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_and_started_again_ends_like_an_uninterrupted_run(recipe: Path, tmp_path: Path) -> None:
    _finish(_start(recipe, tmp_path / "whole"))

    killed = tmp_path / "killed"
    process = _start(recipe, killed)
    _until(lambda: (killed / "metrics.jsonl").is_file() and len(_lines(killed)) >= 10, seconds=300)
    workers = _workers(process)
    process.kill()
    process.communicate()
    _until(lambda: not any(map(_alive, workers)), seconds=60)
    assert len(workers) == 2
    assert len(_lines(killed)) < 40
    assert not (killed / "heads").exists()

    assert "resumed at step" in _finish(_start(recipe, killed))
    _assert_same_run(killed, tmp_path / "whole", tolerance=0.0)
    assert "run is finished" in _finish(_start(recipe, killed))


def _lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("architecture", ["medusa", "recurrent"])
def test_all_zero_stages_agree(recipe: Path, tmp_path: Path, architecture: str) -> None:
    flags = ["--recipe.optim.steps", "8", "--recipe.heads.own_lm_heads", "true"]
    flags += ["--recipe.heads.architecture", architecture, "--recipe.engine.zero_stage"]
    for stage in range(4):
        _finish(_start(recipe, tmp_path / str(stage), *flags, str(stage)))
    first, *_, last, _ = _metrics(tmp_path / "0")
    assert last["loss"] < first["loss"] - 0.1
    for stage in range(1, 4):
        _assert_same_run(tmp_path / str(stage), tmp_path / "0", tolerance=1e-5)


def test_another_number_of_processes_is_refused_when_the_checkpoint_is_partitioned(
    recipe: Path, tmp_path: Path
) -> None:
    _finish(_start(recipe, tmp_path, "--recipe.optim.steps", "2"))
    (tmp_path / "heads" / "config.json").unlink()  # as if it had died just before it wrote the heads
    arguments = ["--recipe", str(recipe), "--recipe.run", str(tmp_path), "--recipe.optim.steps", "2"]
    alone = subprocess.run([sys.executable, "-m", "train", *arguments], cwd=ROOT, capture_output=True, check=False)
    assert alone.returncode == 2
    assert b"processes (1) differ from those that wrote the checkpoint (2)" in alone.stderr


def test_wandb_offline_writes_under_the_run_directory_only(recipe: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    arguments = ["--recipe", str(recipe), "--recipe.run", str(tmp_path / "run"), "--recipe.optim.steps", "2"]
    environment = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "train", *arguments, "--recipe.log.wandb", "offline"],
        cwd=ROOT, env=environment, check=True, timeout=400,
    )  # fmt: skip
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert not list(home.rglob("*"))
