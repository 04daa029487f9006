"""Reads metrics.jsonl and recipe.yaml of a run directory into the numbers of its report; needs no torch.

The files are called training.json and training.png because the demo keeps its own report in the same directory.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from medusa.files import write_json
from medusa.train.recipe_file import flatten
from medusa.train.run_directory import RunDirectory

LOGGER = logging.getLogger("medusa.train")
POINTS = 100
"""Points of a curve; longer runs are averaged over equal numbers of steps."""
SUMMARY = {
    "base.name": "base", "heads.architecture": "heads", "heads.num_heads": "K", "optim.loss": "loss", "optim.lr": "lr",
    "optim.rows_per_step": "rows per step", "data.row_tokens": "tokens per row", "optim.mix_steps": "mix steps",
    "lora.rank": "LoRA rank", "data.train": "data",
}  # fmt: skip
"""Recipe keys in the report, with their names there."""


def read_report(run: str | Path) -> dict[str, Any]:
    """Collect the figures of a run directory.

    Returns:
        "run" (its name), "recipe" (a few values by their names), "curves" (lists over steps: "step", "loss" [weighted
        sum over heads, nats], "head_loss" [nats] and "head_top1" [shares], one list per point with a value per head,
        "lr", "useful_tokens_per_s"), "evaluations" (records with "step" and heldout_*), "totals" (of all steps).

    Raises:
        ValueError: the directory holds no finished step.
    """
    directory = RunDirectory(run)
    records = directory.records()
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise ValueError(f"run directory ({run}) holds no metrics of a step; give the directory of a run that trained")
    names = ("step", "train_seconds")
    evaluations = [
        {name: value for name, value in record.items() if name in names or name.startswith("heldout_")}
        | {"step": record.get("heads_step", record["step"])}
        for record in records
        if "heldout_top1" in record
    ]
    tokens, last = sum(step["useful_tokens"] for step in steps), steps[-1]
    return {
        "run": directory.path.resolve().name,
        "recipe": _recipe(directory.path / "recipe.yaml"),
        "curves": _curves(steps),
        "evaluations": evaluations,
        "totals": {
            "steps": last["step"],
            "epochs": last["epoch"],
            "train_seconds": last["train_seconds"],
            "useful_tokens": tokens,
            "useful_tokens_per_s": tokens / max(last["train_seconds"], 1e-9),
        },
    }


def write_report(run: str | Path) -> Path:
    """Write <run>/training.json and, where matplotlib is installed, <run>/training.png; returns the JSON file."""
    report, path = read_report(run), Path(run) / "training.json"
    write_json(path, report)
    if find_spec("matplotlib") is None:
        _say_once(f"{path.with_suffix('.png')} is not drawn: matplotlib is not installed; pip install matplotlib")
    else:
        from medusa.train.report.picture import draw

        draw(report, path.with_suffix(".png"))
    return path


@cache
def _say_once(text: str) -> None:
    LOGGER.info("%s", text)


def _recipe(path: Path) -> dict[str, Any]:
    nested = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    flat = dict(flatten(nested))
    return {name: flat[key] for key, name in SUMMARY.items() if flat.get(key)}


def _curves(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    width = math.ceil(len(steps) / POINTS)
    parts = [steps[first : first + width] for first in range(0, len(steps), width)]
    # The clock at the end of the previous part; a missing line (a cut file) does no harm.
    clocks = [0.0, *(part[-1]["train_seconds"] for part in parts)]
    return {
        "step": [part[-1]["step"] for part in parts],
        **{name: [fmean(step[name] for step in part) for part in parts] for name in ("loss", "lr")},
        **{
            name: [[fmean(values) for values in zip(*(step[name] for step in part), strict=True)] for part in parts]
            for name in ("head_loss", "head_top1")
        },
        "useful_tokens_per_s": [
            sum(step["useful_tokens"] for step in part) / max(part[-1]["train_seconds"] - clock, 1e-9)
            for clock, part in zip(clocks, parts, strict=False)
        ],
    }
