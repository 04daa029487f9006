"""launch.sh with a stand-in for Python: what it runs, with which arguments, and when it calls pip."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$FAKE_LOG"
case "$*" in
    -V) echo "Python 3.11.99" ;;
    "-c import sys; sys.exit(sys.version_info"*) exit "${FAKE_TOO_OLD:-0}" ;;
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *" pip "*" install "*) exit "${FAKE_PIP_EXIT:-0}" ;;
    "-c import torch"*) echo 4 8 ;;
    "-m train --check"*) exit "${FAKE_CHECK:-0}" ;;
    *"-m train"*) echo "OMP_NUM_THREADS=$OMP_NUM_THREADS" ;;
    "-m data"*) printf '<%s>' "$@" && echo && env ;;
esac
"""


class Clone:
    """A clone whose path has a space, with launch.sh and the files it reads."""

    def __init__(self, tmp_path: Path):
        self.root = tmp_path / "a clone"
        self.root.mkdir()
        for name in ("launch.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.python = tmp_path / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.log = tmp_path / "log"
        self.stamp = self.root / ".venv/.setup"

    def launch(self, *arguments, script=None, cwd=None, **variables):
        keep = {name: os.environ[name] for name in ("PATH", "HOME")}
        return subprocess.run(
            [script or self.root / "launch.sh", *arguments],
            cwd=cwd,
            env=keep | {"PYTHON": str(self.python), "FAKE_LOG": str(self.log)} | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self, pattern):
        """The commands that Python got so far and that contain ``pattern``."""
        return [line for line in self.log.read_text().splitlines() if pattern in line]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


@pytest.mark.parametrize("flag", ["help", "-h", "--help"])
def test_help_sets_nothing_up(clone, flag):
    result = clone.launch(flag)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: ./launch.sh")
    assert not (clone.root / ".venv").exists()


def test_unknown_command(clone):
    result = clone.launch("trian")
    assert result.returncode == 2
    assert "'trian'" in result.stderr
    assert "help" in result.stderr
    assert not (clone.root / ".venv").exists()


def test_no_argument_runs_the_demo(clone):
    assert clone.launch().returncode == 0
    assert clone.calls("-m serve.demo")


def test_second_setup_calls_no_pip(clone):
    assert clone.launch("setup").returncode == 0
    (torch, everything) = clone.calls(" pip --disable")
    assert torch.endswith("-c constraints.txt setuptools torch")
    assert "-c constraints.txt -e .[train,serve,demo,smollm2,dev]" in everything
    assert clone.launch("test", "-x").returncode == 0
    assert len(clone.calls(" pip --disable")) == 2
    assert clone.calls("-m pytest -n auto --maxprocesses 8 --dist loadfile -x")


def test_the_ground_floor_has_a_command(clone):
    assert clone.launch("export", "inspect", "a heads").returncode == 0
    assert clone.calls("-m medusa") == ["-m medusa inspect a heads"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_install_again_in_place(clone, name):
    clone.launch("setup")
    with (clone.root / name).open("a") as file:
        file.write("# changed\n")
    clone.launch("setup")
    assert len(clone.calls(" pip --disable")) == 4
    assert len(clone.calls("-m venv")) == 1


def test_moved_clone_installs_again(clone):
    clone.launch("setup")
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    clone.launch("setup")
    assert len(clone.calls(" pip --disable")) == 4


def test_interrupted_setup_starts_afresh(clone):
    clone.launch("setup")
    clone.stamp.write_text("unfinished\n")
    clone.launch("setup")
    assert len(clone.calls("-m venv --clear")) == 2
    assert clone.stamp.read_text() != "unfinished\n"


def test_failed_pip_is_tried_again(clone):
    result = clone.launch("setup", FAKE_PIP_EXIT="1")
    assert result.returncode == 1
    assert "set-up failed" in result.stderr
    assert clone.launch("setup").returncode == 0
    assert len(clone.calls("-m venv")) == 1


def test_python_too_old(clone):
    result = clone.launch("setup", FAKE_TOO_OLD="1")
    assert result.returncode == 1
    assert f"PYTHON={clone.python}" in result.stderr
    assert not clone.stamp.exists()


def test_torch_index(clone):
    clone.launch("setup", TORCH_INDEX_URL="https://index.example/cpu")
    assert len(clone.calls("--extra-index-url https://index.example/cpu setuptools torch")) == 1


def test_arguments_and_caches_from_another_directory_through_a_link(clone, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(clone.root / "launch.sh")
    result = clone.launch("data", "a b", "*", script=link, cwd="/", XDG_CACHE_HOME="/elsewhere")
    assert result.stdout.startswith("<-m><data><a b><*>\n")
    assert f"XDG_CACHE_HOME={clone.root}/.cache\n" in result.stdout
    assert f"HF_HOME={clone.root}/.cache/huggingface\n" in result.stdout
    assert f"PWD={clone.root}\n" in result.stdout


def test_hugging_face_cache_of_the_user(clone):
    assert "HF_HOME=/models\n" in clone.launch("data", HF_HOME="/models").stdout


def test_train_on_one_machine(clone):
    result = clone.launch("train", "--recipe", "x.yaml", NPROC="2", OMP_NUM_THREADS="3")
    assert result.stdout == "OMP_NUM_THREADS=3\n"
    check, call = clone.calls("-m train")
    assert check == "-m train --check --recipe x.yaml"
    torchrun = f"--nproc_per_node 2 --nnodes 1 --standalone --log_dir {clone.root}/.cache/torchrun"
    assert call == f"-m train.launch {torchrun} -m train --recipe x.yaml"


def test_train_divides_the_cores(clone):
    assert clone.launch("train", NPROC="3").stdout == "OMP_NUM_THREADS=2\n"
    assert clone.launch("train", NPROC="100000").stdout == "OMP_NUM_THREADS=1\n"


def test_train_uses_all_gpus(clone):
    clone.launch("train")
    assert clone.calls("train.launch --nproc_per_node 4")


def test_train_refuses_a_wrong_recipe_before_torchrun(clone):
    assert clone.launch("train", "--recipe", "x.yaml", FAKE_CHECK="2").returncode == 2
    assert not clone.calls("train.launch")


@pytest.mark.parametrize("flag", ["--help", "--check"])
def test_train_needs_no_torchrun_to_talk(clone, flag):
    clone.launch("train", flag)
    assert clone.calls("-m train") == [f"-m train {flag}"]


def test_train_on_several_machines(clone):
    result = clone.launch("train", NPROC="8", NNODES="2")
    assert result.returncode == 2
    assert "MASTER_ADDR" in result.stderr
    clone.launch("train", NPROC="8", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    (call,) = clone.calls("train.launch")
    assert "--nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 --log_dir" in call


def test_gpu_check_without_a_venv_uses_the_machines_python(clone):
    assert clone.launch("gpu-check", "--limit", "9").returncode == 0
    assert clone.calls("-m benchmarks.gpu") == ["-m benchmarks.gpu --limit 9"]
    assert not clone.calls(" pip --disable")
    assert not (clone.root / ".venv").exists()


def test_a_given_interpreter_is_taken_as_it_is(clone):
    assert clone.launch("train", "--recipe", "x.yaml", MEDUSA_PYTHON=str(clone.python)).returncode == 0
    assert clone.calls("-m train.launch")
    assert not clone.calls(" pip --disable")
    assert not (clone.root / ".venv").exists()
