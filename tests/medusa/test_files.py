"""Files that appear whole, and what is left where that went wrong."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from medusa import files
from medusa.files import ABANDONED, digest_of_weights, replace_file, sweep, write_json

KILLED = """
import os, signal, sys
from pathlib import Path
from medusa.files import replace_file
replace_file(Path(sys.argv[1]), lambda beside: (beside.write_text("half"), os.kill(os.getpid(), signal.SIGKILL)))
"""


def test_what_a_killed_process_left_is_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "a[1].json"
    killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    write_json(path, {})
    assert left.exists(), "its writer may still be alive"
    before = time.time() - ABANDONED - 1
    os.utime(left, (before, before))
    write_json(path, {"a": 1})
    assert list(tmp_path.iterdir()) == [path]


def test_only_what_is_named_and_old_is_removed(tmp_path):
    before = time.time() - ABANDONED - 1
    for name in ("old.tmp", "new.tmp", "old.part"):
        (tmp_path / name).write_text("")
        if name != "new.tmp":
            os.utime(tmp_path / name, (before, before))
    sweep(tmp_path, "*.tmp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.tmp", "old.part"]
    sweep(tmp_path / "none", "*")


def test_a_failed_writer_leaves_nothing(tmp_path):
    (tmp_path / "a").write_text("before")

    def fail(beside):
        beside.write_text("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        replace_file(tmp_path / "a", fail)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_what_is_kept_has_one_place_with_and_without_launch_sh(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(files, "CLONE", tmp_path)
    assert files.cache_directory() == tmp_path / "home" / ".cache" / "medusa", "an installed package"
    (tmp_path / "launch.sh").touch()
    assert files.cache_directory() == tmp_path / "home" / ".cache" / "medusa", "a clone that is not set up"
    (tmp_path / ".cache").mkdir()
    assert files.cache_directory() == tmp_path / ".cache" / "medusa"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "named"))
    assert files.cache_directory() == tmp_path / "named" / "medusa"


def test_a_model_that_was_trained_again_has_another_digest(base_directory, tmp_path):
    copy = Path(shutil.copytree(base_directory, tmp_path / "base"))
    assert digest_of_weights(copy) == digest_of_weights(base_directory) != ""
    file = copy / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(weights, file, metadata={"format": "pt"})
    assert digest_of_weights(copy) != digest_of_weights(base_directory)
    assert digest_of_weights(file) and not digest_of_weights(Path("some/model"))
