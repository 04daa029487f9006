"""Packages that a machine without a network lacks travel as wheels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.wheels import CARRIED, install_missing, pack, pip_commands, total_bytes
from tests.benchmarks.gpu.wheel import make_wheel

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"


def test_only_missing_packages_are_installed(tmp_path):
    make_wheel(tmp_path / "wheels", "surely_not_installed")
    make_wheel(tmp_path / "wheels", "torch")
    assert install_missing(tmp_path / "wheels", tmp_path / "site") == ["surely_not_installed"]
    assert not (tmp_path / "site" / "torch.py").exists()
    words = [sys.executable, "-c", "import surely_not_installed as s; print(s.value)"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.run(words, env=environment, capture_output=True, check=True).stdout == b"7\n"
    assert install_missing(tmp_path / "nowhere", tmp_path / "site") == []


def test_pack_asks_for_the_pinned_versions(tmp_path):
    download, build = pip_commands(tmp_path, CONSTRAINTS)
    assert "pydantic_core" in [word.partition("==")[0] for word in download]
    assert all("==" in word for word in download[-len(CARRIED) :])
    assert build[-1].startswith("deepspeed==")


def test_pack_refuses_what_is_not_pinned_or_too_large(tmp_path):
    (tmp_path / "constraints.txt").write_text("deepspeed==1\n")
    with pytest.raises(ValueError, match=r"packages \(annotated-types, .*pin them there"):
        pack(tmp_path / "wheels", tmp_path / "constraints.txt")
    make_wheel(tmp_path / "wheels", "large")
    size = (tmp_path / "wheels" / "large-1.0-py3-none-any.whl").stat().st_size
    assert total_bytes(tmp_path / "wheels") == size
    with pytest.raises(ValueError, match="must be at most 10 together"):
        total_bytes(tmp_path / "wheels", largest=10)
