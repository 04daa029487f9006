"""Small C++ kernels, called through ctypes.

A wheel contains them compiled (``medusa.cpu.flavours``). Otherwise the system's compiler builds them once, into the
user's cache.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from medusa.cpu import flavours
from medusa.files import cache_directory, private_directory, replace_file

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels") / "kernels.cpp"
"""The kernels of ``medusa.cpu.native``."""
COMPILERS = ("g++", "clang++", "c++")
"""Compilers to try if ``$CXX`` is not set."""
EXTRA_FLAGS = "MEDUSA_CXXFLAGS"
"""Environment variable with more flags for the compiler. If it is set, kernels are always built, even with a wheel.
Example: "-march=x86-64-v3" excludes instructions beyond AVX2."""
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-w")
TIMEOUT = 600
"""Time limit of the compiler in seconds; a fast machine needs ten."""


class NativeUnavailableError(RuntimeError):
    """A kernel cannot be built or loaded here."""


@cache
def load(source: Path) -> ctypes.CDLL:
    """Load the compiled library of a source file: the wheel's, or one that is built here.

    Raises:
        NativeUnavailableError: There is neither a library in the wheel nor a compiler, or compiling or loading fails.
    """
    try:
        library = None if os.environ.get(EXTRA_FLAGS) else flavours.shipped(source)
        return ctypes.CDLL(str(library or _built(source)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        first = next((index for index, line in enumerate(said) if "error" in line), 0)
        told = "\n".join(said[first:])[:500]
        raise NativeUnavailableError(f"kernel ({source.name}) does not build or load: {told}") from error


def _built(source: Path) -> Path:
    """The library in the cache; built if there is none yet for this source, compiler and processor."""
    compiler = find_compiler()
    version = _run([*compiler, "--version"])
    flags = _flags(version)
    name = f"{source.stem}-{_fingerprint(source, compiler, flags, version)}"
    library = _writable(cache_directory(), name) / f"{name}.so"
    if not library.exists():
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # if several processes start together, one builds
            if not library.exists():
                logger.info("kernel %s: compiling it for this processor, once; this takes up to a minute", source.name)
                replace_file(library, lambda beside: compile_library(source, compiler, flags, beside))
                logger.info("kernel %s is built: %s", source.name, library)
    return library


def compiler_version() -> str:
    """The compiler's own description of its version, in one line.

    Raises:
        NativeUnavailableError: There is no compiler, or it does not run.
    """
    command = [*find_compiler(), "--version"]
    try:
        return next(iter(_run(command).splitlines()), command[0])
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"compiler ({shlex.join(command)}) does not run: {error}") from error


def find_compiler() -> list[str]:
    """The command of the compiler, ``$CXX`` first.

    Raises:
        NativeUnavailableError: There is no compiler.
    """
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NativeUnavailableError(f"CXX ({os.environ['CXX']}) is no command: {error}; correct it") from error
    if named and shutil.which(named[0]):
        return named
    found = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if found is None:
        raise NativeUnavailableError(f"no C++ compiler ({', '.join(COMPILERS)}) is on the path; install one")
    return [found]


def _writable(directory: Path, name: str) -> Path:
    """This directory if it holds the file or is writable; otherwise a temporary directory of this user."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    if (directory / f"{name}.so").exists() or os.access(directory, os.W_OK | os.X_OK):
        return directory
    temporary = private_directory()
    logger.info("kernels: %s cannot be written, they are kept in %s", directory, temporary)
    return temporary


def compile_library(
    source: Path, compiler: list[str], flags: list[str], library: Path, timeout: float | None = TIMEOUT
) -> None:
    """Compile a source file.

    Args:
        source: The file.
        compiler: The command of the compiler.
        flags: For compiling; linking needs none.
        library: The file to write.
        timeout: Seconds; None = no limit.

    Raises:
        subprocess.SubprocessError: The compiler fails, or takes too long.
    """
    objects = library.with_name(f"{library.name}.o")
    try:
        _run([*compiler, *flags, "-c", str(source), "-o", str(objects)], timeout)
        # Linked without OpenMP: torch's OpenMP is loaded and shared, because two sets of threads slow each other down.
        _run([*compiler, "-shared", str(objects), "-o", str(library)])
    finally:
        objects.unlink(missing_ok=True)


def _flags(version: str) -> list[str]:
    """The flags for a compiler with this version line."""
    here = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    hidden = ["-mno-avx512bf16"] if flavours.avoids_bfloat16() else []
    # On Linux torch uses GCC's OpenMP, which is shared. Another OpenMP would be a second set of threads beside torch's,
    # so the kernels then use threads of their own.
    openmp = [] if "clang" in version or sys.platform != "linux" else ["-fopenmp"]
    return [*FLAGS, here, *hidden, *openmp, *os.environ.get(EXTRA_FLAGS, "").split()]


def _run(command: list[str], timeout: float | None = TIMEOUT) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout).stdout


def _fingerprint(source: Path, compiler: list[str], flags: list[str], version: str) -> str:
    """A name that changes with the source, the compiler, its flags and the CPU for which "native" compiles."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    parts = (
        *(file.read_bytes() for file in files),
        version.encode(),
        " ".join([*compiler, *flags]).encode(),
        flavours.processor().encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
