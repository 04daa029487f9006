"""What an installation is to those who read it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(path).decode().strip() == str(clone)
    assert (clone / "medusa" / "py.typed").is_file()
    assert all((clone / "medusa" / package / "__init__.py").is_file() for package in LINKED)
