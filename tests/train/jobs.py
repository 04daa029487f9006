"""Training jobs as a user starts them: recipes, torchrun's agents as processes, and what a run directory holds."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from medusa.train.__main__ import main

ROOT = Path(__file__).parents[2]
Job = subprocess.Popen[str]
Acting = Callable[..., AbstractContextManager[None]]
"""What `before_step` and `interrupted_at` are."""


def write_recipe(path: Path, base: Path, samples: Path, sections: Mapping[str, Mapping[str, Any]]) -> Path:
    """A small recipe; `sections` override its values."""
    values: dict[str, dict[str, Any]] = {
        "base": {"name": str(base), "dtype": "float32"},
        "heads": {"num_heads": 3},
        "data": {"train": str(samples), "row_tokens": 96},
        "optim": {"lr": 0.01, "rows_per_step": 8, "micro_rows": 2, "steps": 40},
        "engine": {"device": "cpu"},
        "log": {"checkpoint_steps": 7},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run(recipe: Path, directory: Path, **values: Any) -> int:
    """Train in this process, with recipe values by their dotted keys; the exit status."""
    return main(["--recipe", str(recipe), "--recipe.run", str(directory), *flags(**values)])


def flags(**values: Any) -> list[str]:
    return [word for key, value in values.items() for word in (f"--recipe.{key}", str(value))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(arguments: list[str], processes: int = 2, node: int | None = None, port: int = 0) -> Job:
    """Start torchrun; `node` 0 or 1 makes it one of two machines that meet at `port`."""
    command = [sys.executable, "-m", "medusa.train.launch", f"--nproc_per_node={processes}"]
    command += [f"--master_port={port or free_port()}"]
    if node is not None:
        command += ["--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def train(recipe: Path, run: Path, values: Mapping[str, Any] | None = None, **options: Any) -> Job:
    """Start a training run under torchrun."""
    words = ["-m", "medusa.train", "--recipe", str(recipe), "--recipe.run", str(run), *flags(**values or {})]
    return launch(words, **options)


def finish(job: Job, status: int = 0) -> str:
    """Wait for the job; what it said."""
    _, errors = job.communicate(timeout=400)
    assert job.returncode == status, errors
    assert "Traceback" not in errors, errors
    return errors


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def assert_same_run(run: Path, reference: Path, tolerance: float) -> None:
    for ours, theirs in zip(metrics(run), metrics(reference), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=tolerance)
        assert ours.get("grad_norm") == pytest.approx(theirs.get("grad_norm"), abs=10 * tolerance)
    files = sorted(path.relative_to(reference) for path in (reference / "heads").rglob("*.safetensors"))
    for name in files:
        expected = load_file(reference / name)
        for key, value in load_file(run / name).items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=tolerance)


def workers(job: Job) -> list[int]:
    """Process ids of a job's workers, by local rank."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text(encoding="utf-8")
    return [int(pid) for pid in children.split()]


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
