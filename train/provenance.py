"""The origin of trained heads: recipe, data, base, code, machine, figures."""

import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from medusa import __version__
from medusa.base.model import BaseModel
from medusa.cpu.flavours import processor_name
from medusa.data.packing import PackedRows
from medusa.train.config import Recipe
from medusa.train.report import read_report
from medusa.train.workers import Workers

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "deepspeed", "peft", "safetensors")
"""Packages that can affect results."""


def provenance(
    recipe: Recipe, figures: dict[str, Any], base: BaseModel, rows: PackedRows, workers: Workers
) -> dict[str, Any]:
    """The contents of `provenance.json`, complete; exports and pushes remove private values (`medusa.io.published`).

    Args:
        recipe: the recipe; its run directory has the tokens and seconds of all starts together.
        figures: steps, seconds, held-out accuracy, tokens per step.
        base: the frozen model.
        rows: the training rows.
        workers: the processes of the last start.
    """
    return {
        "recipe": asdict(recipe),
        "base": {
            "name": base.name,
            "revision": getattr(base.model.config, "_commit_hash", None),
            **({"source": base.source} if base.source else {}),
            "training": "changed by adapter/: it answers otherwise than the original" if recipe.lora.rank else "frozen",
        },
        "figures": figures,
        "totals": read_report(recipe.run)["totals"],
        "data": {
            "source": recipe.data.train,
            "fingerprint": rows.fingerprint(),
            "rows": len(rows),
            "row_tokens": recipe.data.row_tokens,
        },
        "command": shlex.join(sys.orig_argv),
        "processes": workers.world_size,
        "device": device_name(workers.device),  # of process 0
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **software(),
    }


def software() -> dict[str, Any]:
    """Versions of Python, of this code and of packages that can affect results, and this code's revision."""
    own = {"python": platform.python_version(), "medusa": __version__}
    return {
        "versions": own | {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The git commit of this code, None outside a clone."""
    here = Path(__file__)
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)  # it may be installed in another clone
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(directory: Path, *arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return answer.stdout.strip()
