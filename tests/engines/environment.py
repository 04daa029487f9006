"""vLLM's own virtual environment: it needs other versions of what we have."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / ".cache" / "vllm"
REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")


class UnavailableError(Exception):
    """The environment cannot be made here; the message is the installer's."""


def vllm_python() -> Path:
    """The environment's interpreter; the first call makes the environment, in minutes, out of a package index."""
    python, stamp = DIRECTORY / "bin" / "python", DIRECTORY / ".installed"
    contents = f"{sys.version}\n{REQUIREMENTS.read_text(encoding='utf-8')}"
    DIRECTORY.parent.mkdir(exist_ok=True)
    with DIRECTORY.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != contents:
            _install(python)
            stamp.write_text(contents, encoding="utf-8")  # last: what was interrupted is made anew
    return python


def _install(python: Path) -> None:
    torch_index = os.environ.get("TORCH_INDEX_URL")
    options = ["--extra-index-url", torch_index] if torch_index else []
    _run(sys.executable, "-m", "venv", "--clear", str(DIRECTORY))
    _run(str(python), "-m", "pip", "install", "-qq", "--no-cache-dir", "--no-deps", *options, "-r", str(REQUIREMENTS))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError((done.stderr or done.stdout).strip()[-500:])
