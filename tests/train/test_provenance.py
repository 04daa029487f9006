"""Where heads come from."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from medusa.train import provenance


def test_the_revision_is_that_of_this_code_and_of_no_other_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "venv" / "provenance.py"
    installed.parent.mkdir()
    shutil.copy(provenance.__file__, installed)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "someone else's"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.software()["revision"] is None
    subprocess.run([*git, "add", "venv"], check=True)
    revision = provenance.software()["revision"]
    assert revision is not None
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", revision)
