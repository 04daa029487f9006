"""Build what a release consists of: the source distribution, and from it the wheel of this system.

The wheel holds the kernels compiled for all kinds of processors of this architecture (medusa/cpu/flavours.py). Its name
says which systems can run it: auditwheel derives that from the symbols of system libraries that the kernels need.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this clone's medusa, whichever is installed

from medusa.cpu import build, flavours  # noqa: E402

PACKAGES = ("medusa", "benchmarks", "data", "serve", "train")
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="where both are written (default: dist)")
    add("--here", action="store_true", help="compile for this machine's processor only, to try it out")
    options = parser.parse_args()
    chosen = [*flavours.able()][:1] if options.here else flavours.FLAVOURS.get(platform.machine(), ())
    if sys.platform != "linux" or not chosen:
        known, here = ", ".join(flavours.FLAVOURS), f"{platform.machine()}, {platform.system()}"
        parser.error(f"machine ({here}) is not one of {known} with Linux; build the wheel on such a machine")
    if find_spec("auditwheel") is None:
        parser.error("auditwheel is not installed; pip install auditwheel")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        sdist = run_setuptools("build_sdist", copy_clone(work / "clone"), out)
        shutil.unpack_archive(sdist, work, filter="data")
        source = work / sdist.name.removesuffix(".tar.gz")
        compile_kernels(source / build.SOURCE.relative_to(ROOT), chosen)
        wheel = run_setuptools("build_wheel", source, work)
        # Nothing is patched: all libraries that the kernels need are the system's, or torch's and loaded.
        command = [sys.executable, "-m", "auditwheel", "repair", "--patcher", "none", "--wheel-dir", out, wheel]
        subprocess.run(command, check=True)


def copy_clone(tree: Path) -> Path:
    """What a build reads, without what earlier ones have left in the clone: setuptools would pack that too."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "embedded")
        shutil.copytree(ROOT / package, tree / package, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    return tree


def run_setuptools(hook: str, tree: Path, out: Path) -> Path:
    """The file that one of setuptools' build hooks makes of a source tree."""
    code = f"import sys; from setuptools.build_meta import {hook}; print({hook}(sys.argv[1]))"
    command = [sys.executable, "-c", code, out]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


def compile_kernels(source: Path, chosen: Iterable[flavours.Flavour]) -> None:
    """Compile a source for some flavours, as many at a time as there are cores; the libraries lie beside it."""
    compiler = build.find_compiler()

    def compile_one(flavour: flavours.Flavour) -> None:
        library = flavour.library(source)
        flags = [*build.FLAGS, "-fopenmp", *flavour.flags.split()]
        try:
            build.compile_library(source, compiler, flags, library, timeout=None)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{library.name} does not compile: {error.stderr}") from error
        print(f"compiled {library.name}", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, chosen))


if __name__ == "__main__":
    main()
