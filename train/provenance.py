"""Where trained heads come from: recipe, versions, revision, figures."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from train.config import Recipe
from train.recipe_file import resolved


def provenance(recipe: Recipe, figures: dict[str, Any], world_size: int) -> dict[str, Any]:
    """What is written beside the heads.

    Args:
        recipe: the recipe that trained them.
        figures: steps, seconds, held-out accuracy, tokens per step.
        world_size: number of processes.
    """
    return {
        "recipe": resolved(recipe),
        "base": "changed by adapter/ (Medusa-2): its answers are not the original's" if recipe.lora.rank else "frozen",
        "figures": figures,
        "processes": world_size,
        **software(),
    }


def software() -> dict[str, Any]:
    """Versions of Python and of the packages that decide results, and this code's revision."""
    packages = ("torch", "transformers", "deepspeed")
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "revision": _revision(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The git commit of this code, None outside a clone."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
