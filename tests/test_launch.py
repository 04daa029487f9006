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
    "-m medusa data"*) printf '<%s>' "$@" && echo && env ;;
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


def test_help_and_an_unknown_command_set_nothing_up(clone):
    for flag in ("help", "-h", "--help"):
        result = clone.launch(flag)
        assert result.returncode == 0
        assert result.stdout.startswith("usage: ./launch.sh")
    result = clone.launch("trian")
    assert result.returncode == 2
    assert "'trian'" in result.stderr
    assert "help" in result.stderr
    assert not (clone.root / ".venv").exists()


def test_no_argument_runs_the_demo(clone):
    assert clone.launch().returncode == 0
    assert clone.calls("-m medusa demo")


def test_second_setup_calls_no_pip(clone):
    assert clone.launch("setup").returncode == 0
    (torch, everything) = clone.calls(" pip --disable")
    assert torch.endswith("-c constraints.txt setuptools torch")
    assert "-c constraints.txt -e .[train,serve,demo,smollm2,dev]" in everything
    assert clone.launch("test", "-x").returncode == 0
    assert len(clone.calls(" pip --disable")) == 2
    assert clone.calls("-m pytest -n auto --maxprocesses 8 --dist loadfile -x")


def test_changed_requirements_and_a_moved_clone_install_again_in_place(clone):
    clone.launch("setup")
    for name in ("pyproject.toml", "constraints.txt"):
        with (clone.root / name).open("a") as file:
            file.write("# changed\n")
        clone.launch("setup")
    assert len(clone.calls(" pip --disable")) == 6
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    clone.launch("setup")
    assert len(clone.calls(" pip --disable")) == 8
    assert len(clone.calls("-m venv")) == 1


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


def test_pip_compiles_only_for_those_whose_python_may_not(clone):
    clone.launch("setup")
    assert len(clone.calls(" --no-compile ")) == 2
    clone.stamp.unlink()
    clone.launch("setup", PYTHONDONTWRITEBYTECODE="1")
    assert (len(clone.calls(" --no-compile ")), len(clone.calls(" pip --disable"))) == (2, 4)


def test_torch_index(clone):
    clone.launch("setup", TORCH_INDEX_URL="https://index.example/cpu")
    assert len(clone.calls("--extra-index-url https://index.example/cpu setuptools torch")) == 1


def test_arguments_and_caches_from_another_directory_through_a_link(clone, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(clone.root / "launch.sh")
    result = clone.launch("data", "a b", "*", script=link, cwd="/", XDG_CACHE_HOME="/elsewhere")
    assert result.stdout.startswith("<-m><medusa><data><a b><*>\n")
    assert f"XDG_CACHE_HOME={clone.root}/.cache\n" in result.stdout
    assert f"HF_HOME={clone.root}/.cache/huggingface\n" in result.stdout
    assert f"PWD={clone.root}\n" in result.stdout


def test_hugging_face_cache_of_the_user(clone):
    assert "HF_HOME=/models\n" in clone.launch("data", HF_HOME="/models").stdout


COMMANDS = ("demo", "chat", "serve", "heads", "data", "train", "report", "study", "export", "bench")


def test_commands_are_those_of_the_package(clone):
    for command in COMMANDS:
        assert clone.launch(command, "a b", "--c").returncode == 0
    assert clone.calls("-m medusa") == [f"-m medusa {command} a b --c" for command in COMMANDS]


@pytest.mark.parametrize(("command", "called"), [("gpu-check", "medusa.benchmarks.gpu"), ("doctor", "medusa doctor")])
def test_without_a_venv_the_machines_python_looks_at_it(clone, command, called):
    assert clone.launch(command, "--json", "9").returncode == 0
    assert clone.calls("-m medusa") == [f"-m {called} --json 9"]
    assert not clone.calls(" pip --disable")
    assert not (clone.root / ".venv").exists()


def test_a_given_interpreter_is_taken_as_it_is(clone):
    assert clone.launch("train", "--recipe", "x.yaml", MEDUSA_PYTHON=str(clone.python)).returncode == 0
    assert clone.calls("-m medusa train")
    assert not clone.calls(" pip --disable")
    assert not (clone.root / ".venv").exists()
