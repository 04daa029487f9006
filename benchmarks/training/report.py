"""What the benchmarks of the trainer say beside their figures, and how they show them."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from train.provenance import device_name, software


def environment(device: torch.device, words: Sequence[str]) -> dict[str, Any]:
    """The command, the machine and the versions that figures belong to."""
    return {
        "command": shlex.join(["python", "-m", "benchmarks.training", *words]),
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        **software(),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as aligned text."""
    cells = [[name.replace("_", " ") for name in rows[0]], *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def draw_loss(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Peak memory against the number of heads, one field per vocabulary, for the most positions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    vocab, positions = sorted({row["vocab"] for row in rows}), max(row["positions"] for row in rows)
    figure, fields = pyplot.subplots(1, len(vocab), figsize=(4.5 * len(vocab), 4), layout="constrained", squeeze=False)
    for axes, size in zip(fields[0], vocab, strict=True):
        chosen = [row for row in rows if (row["vocab"], row["positions"]) == (size, positions)]
        for name in dict.fromkeys(row["loss"] for row in chosen):
            points = [(row["heads"], row["peak_mb"]) for row in chosen if row["loss"] == name and row["peak_mb"]]
            axes.plot(*zip(*points, strict=True), "o-", label=name) if points else None
        axes.set(title=f"V = {size:,}, {positions:,} positions", xlabel="heads", ylabel="peak memory of the loss, MB")
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    fields[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
