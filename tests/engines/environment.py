"""Virtual environments of engines: they need other versions of what we have."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"


class UnavailableError(Exception):
    """The environment cannot be made here; the message is the installer's."""


def python_with(engine: str) -> Path:
    """The interpreter of an engine's environment; the first call makes it, in minutes, out of a package index.

    Args:
        engine: As in ``{engine}-requirements.txt``.
    """
    directory, requirements = CACHE / engine, Path(__file__).with_name(f"{engine}-requirements.txt")
    python, stamp = directory / "bin" / "python", directory / ".installed"
    contents = f"{sys.version}\n{requirements.read_text(encoding='utf-8')}"
    directory.parent.mkdir(exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != contents:
            _install(directory, requirements)
            stamp.write_text(contents, encoding="utf-8")  # last: what was interrupted is made anew
    return python


def _install(directory: Path, requirements: Path) -> None:
    torch_index = os.environ.get("TORCH_INDEX_URL")
    options = ["--extra-index-url", torch_index] if torch_index else []
    install = ("-m", "pip", "install", "-qq", "--no-cache-dir", "--no-deps", "--no-compile", *options)
    _run(sys.executable, "-m", "venv", "--clear", str(directory))
    _run(str(directory / "bin" / "python"), *install, "-r", str(requirements))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError((done.stderr or done.stdout).strip()[-500:])
