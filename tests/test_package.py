"""What an installation is to those who read it."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import medusa

ROOT = Path(__file__).parents[1]
LINKED = ("data", "train", "serve", "benchmarks")
"""Folders of the top level that are packages of `medusa` by a link."""


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    """They run no import hooks, which setuptools would install otherwise."""
    clone, out = tmp_path / "clone", tmp_path / "out"
    for package in ("medusa", *LINKED):
        ignore = shutil.ignore_patterns("embedded", "pretrained")
        shutil.copytree(ROOT / package, clone / package, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    out.mkdir()
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=clone, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    assert wheel.name.startswith(f"medusa_decoding-{medusa.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(path).decode().strip() == str(clone)
    assert (clone / "medusa" / "py.typed").is_file()
    assert all((clone / "medusa" / package / "__init__.py").is_file() for package in LINKED)


def test_what_tells_the_version_tells_the_same():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == medusa.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == medusa.__version__


@pytest.mark.parametrize(("tag", "status"), [(f"v{medusa.__version__}", 0), (medusa.__version__, 1), ("v0.0.9", 1)])
def test_the_workflow_refuses_a_tag_of_another_version(tag, status):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    (script,) = (step["run"] for job in jobs.values() for step in job["steps"] if "tag" in step.get("if", ""))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"GITHUB_REF_NAME": tag, "PATH": path}
    command = ["bash", "-e", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert (f"tag ({tag}) is not v{medusa.__version__}" in done.stdout) == bool(status)
