"""Small C++ kernels: built once with the system's compiler, kept in the user's cache, called through ctypes."""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from medusa.files import cache_directory, replace_file

logger = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++", "c++")
EXTRA_FLAGS = "MEDUSA_CXXFLAGS"
"""Environment variable with more flags for the compiler; "-mno-avx512f" hides what a processor has."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-Wno-ignored-attributes")
TIMEOUT = 120
"""Seconds; a kernel compiles in a few."""


class NativeUnavailableError(RuntimeError):
    """A kernel cannot be built or loaded here."""


@cache
def load(source: Path) -> ctypes.CDLL:
    """The library that a source file compiles to; built where the cache has none for this source, compiler and CPU.

    Raises:
        NativeUnavailableError: There is no compiler, it fails, or what it makes cannot be loaded.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailableError(f"no C++ compiler ({', '.join(COMPILERS)}) is on the path; install one")
    try:
        library = cache_directory() / f"{source.stem}-{_fingerprint(source, compiler)}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with library.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that start together one builds
                if not library.exists():
                    logger.info("kernel %s: building it for this processor, once; half a minute", source.name)
                    replace_file(library, lambda beside: _build(source, compiler, beside))
                    logger.info("kernel %s is built: %s", source.name, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise NativeUnavailableError(f"kernel ({source.name}) does not build or load: {said.strip()[-500:]}") from error


def _build(source: Path, compiler: str, library: Path) -> None:
    objects = library.with_name(f"{library.name}.o")
    try:
        _run([compiler, *_flags(), "-c", str(source), "-o", str(objects)])
        # Linked without OpenMP: it shares the threads of torch's, which is loaded; two sets would wait for each other.
        _run([compiler, "-shared", str(objects), "-o", str(library)])
    finally:
        objects.unlink(missing_ok=True)


def _flags() -> list[str]:
    return [*FLAGS, *os.environ.get(EXTRA_FLAGS, "").split()]


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout


def _fingerprint(source: Path, compiler: str) -> str:
    """A name that changes with the source, the compiler, its flags and the CPU that "native" means."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    parts = (
        *(file.read_bytes() for file in files), _run([compiler, "--version"]).encode(), " ".join(_flags()).encode(),
        _cpu().encode(),
    )  # fmt: skip
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
