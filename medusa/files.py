"""Files that appear whole under their name or not at all, and JSON files with a header that names their format."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
"""Version of every JSON file with a ``format`` that this package writes."""
CLONE = Path(__file__).resolve().parents[1]
"""Root of the repository, if the package is used from a clone."""
ABANDONED = 3600.0
"""Seconds without a change after which a temporary file counts as abandoned."""
PIECES, PIECE = 64, 4096
"""Number of pieces of a file of weights that are read to tell it from another one, and bytes of each."""


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside ``path``, flush it to the disk, and rename it to ``path``.

    Temporary files that killed processes have left are removed.
    """
    sweep(path.parent, f".{glob.escape(path.name)}.tmp*")
    # A random name and not the process id, because processes of two machines may have the same id.
    temporary = path.with_name(f".{path.name}.tmp{secrets.token_hex(4)}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def full_disk_named(directory: Path, remedy: str) -> Iterator[None]:
    """Say which disk is full, and what to do, in errors about that."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"disk of {directory} is full; {remedy}") from error


def digest_of_weights(path: Path) -> str:
    """A digest of a model on disk, from the sizes and some pieces of its files; "" = there is none (a Hub id)."""
    ends = ("*.safetensors", "*.bin", "*.gguf")
    files = [path] if path.is_file() else sorted(file for end in ends for file in path.glob(end))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for at in range(0, size, max(1, size // PIECES)):
                opened.seek(at)
                digest.update(opened.read(PIECE))
    return digest.hexdigest()[:16] if files else ""


def clones_cache() -> Path | None:
    """The .cache of the clone from which this package runs, if launch.sh has set it up; otherwise None."""
    cache = CLONE / ".cache"
    return cache if (CLONE / "launch.sh").is_file() and os.access(cache, os.W_OK) else None


def cache_directory() -> Path:
    """The cache directory of this package: ``medusa`` in $XDG_CACHE_HOME, the clone's .cache, or ~/.cache.

    launch.sh sets the clone's, so that its commands and plain Python share one cache.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or clones_cache() or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        return private_directory()
    return home / "medusa"


def private_directory() -> Path:
    """A temporary directory of this user, which holds code and weights that nobody else may have put there.

    Raises:
        PermissionError: Somebody else has taken its name.
    """
    directory = Path(tempfile.gettempdir()) / f"medusa-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise PermissionError(f"temporary directory ({directory}) is somebody else's; set XDG_CACHE_HOME")
    return directory


def sweep(directory: Path, pattern: str, age: float = ABANDONED) -> None:
    """Remove temporary files that killed processes have left in a directory.

    Args:
        directory: The directory; it need not exist.
        pattern: Pattern of the names of temporary files and directories.
        age: Seconds since their last change; 0 only if no other process uses the directory.
    """
    for path in directory.glob(pattern):
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - path.stat().st_mtime < age:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write text, whole or not at all."""
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an object as JSON, whole or not at all."""
    replace_text(path, json.dumps(values, indent=2) + "\n")


def header(name: str) -> dict[str, Any]:
    """The keys that name the format of a JSON file: "tree", "settings"."""
    return {"format": f"medusa-{name}", "format_version": FORMAT_VERSION}


def read_object(path: Path, name: str, remedy: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        name: The expected content, for errors.
        remedy: The remedy, which ends every error.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not UTF-8, not JSON, or not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{name} ({path}) does not exist; {remedy}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} ({path}) is not valid JSON: {error}; {remedy}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} ({path}) is not a JSON object; {remedy}")
    return values


def peek_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it is missing or cannot be read."""
    try:
        return read_object(path, "file", "")
    except (OSError, ValueError):
        return None


def read_json(path: Path, name: str, remedy: str) -> dict[str, Any]:
    """``read_object`` for a file with ``header(name)``; another format or version raises ValueError too."""
    values, expected = read_object(path, name, remedy), header(name)
    if values.get("format") != expected["format"]:
        raise ValueError(f"{name} ({path}) is not of the format {expected['format']!r}; {remedy}")
    if values.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{name} ({path}) has format version {values.get('format_version')}; update this package")
    return values
