"""Packages that a machine without a network lacks, carried there as wheels.

``pack`` runs where a network is and fills a directory; ``install_missing`` runs on the other machine and installs only
what is not there, into a directory of its own. Standard library only: nothing else may be there yet.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

CARRIED = (
    "annotated-types einops hjson iniconfig markdown-it-py mdurl msgpack ninja packaging pluggy psutil py-cpuinfo"
    " pydantic pydantic_core pygments pytest pyyaml rich tqdm typing-inspection typing-extensions"
).split()
"""All but torch, transformers and matplotlib (with their needs) that tests, benchmarks and training import."""
BUILT = "deepspeed"
"""Has no wheel at the registry."""
PYTHON_VERSION = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_12_x86_64")
LARGEST = 45 << 20
"""Bytes of all wheels together: they travel with the clone."""


def pack(directory: Path, constraints: Path) -> int:
    """Fill a directory with wheels of the versions that CI runs with.

    Args:
        directory: Created if missing; wheels that are there are kept.
        constraints: Names every version as ``name==version``.

    Returns:
        Bytes of all wheels.

    Raises:
        ValueError: A package is not pinned, or the wheels are too large together.
        subprocess.CalledProcessError: pip failed; its message is on stderr.
    """
    commands = pip_commands(directory, constraints)
    directory.mkdir(parents=True, exist_ok=True)
    for words in commands:  # without the kernels, which are not used, the wheel that is built is pure Python
        subprocess.run([sys.executable, *words], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    return total_bytes(directory)


def pip_commands(directory: Path, constraints: Path) -> list[list[str]]:
    """What downloads the wheels of all packages but one, and what builds that one: arguments of the interpreter.

    Raises:
        ValueError: A package is not pinned.
    """
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints.read_text(encoding="utf-8"), re.MULTILINE))
    versions = {_normal(name): version for name, version in pinned.items()}
    if unpinned := [name for name in (*CARRIED, BUILT) if _normal(name) not in versions]:
        raise ValueError(f"packages ({', '.join(unpinned)}) have no version in {constraints}; pin them there")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    target = ["--python-version", PYTHON_VERSION, "--implementation", "cp", "--only-binary", ":all:"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    wanted = [f"{name}=={versions[_normal(name)]}" for name in CARRIED]
    built = f"{BUILT}=={versions[BUILT]}"
    return [
        [*pip, "download", "-q", "--no-deps", "-d", str(directory), *target, *wanted],
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(directory), built],
    ]


def total_bytes(directory: Path, largest: int = LARGEST) -> int:
    """Bytes of all wheels together.

    Raises:
        ValueError: They are more than ``largest``.
    """
    size = sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))
    if size > largest:
        raise ValueError(f"wheels ({size} bytes) must be at most {largest} together; remove old ones in {directory}")
    return size


def install_missing(directory: Path, site: Path) -> list[str]:
    """Install those wheels whose package this interpreter lacks.

    Args:
        directory: Of the wheels; may be missing.
        site: Where they go; belongs on PYTHONPATH afterwards.

    Returns:
        Names of the wheels' packages that were missing.

    Raises:
        subprocess.CalledProcessError: pip failed; its message is on stderr.
    """
    missing = [wheel for wheel in sorted(directory.glob("*.whl")) if not _installed(wheel.name.partition("-")[0])]
    if missing:
        words = ["install", "-q", "--no-index", "--no-deps", "--upgrade", "--target", str(site), *map(str, missing)]
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True)
    return [wheel.name.partition("-")[0] for wheel in missing]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
