"""Tokens per second and the first token by number of clients; a line per server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.study.picture import COLOURS

FIELDS = {
    "tokens_per_second": "output tokens per second",
    "first_token_p50": "first token, median, seconds",
    "inter_token_p50": "between tokens, median, seconds",
}
FROM_ZERO = "tokens_per_second"
"""The field whose axis is not logarithmic."""


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw what ``medians`` gives into a PNG file."""
    figure, fields = pyplot.subplots(1, len(FIELDS), figsize=(5 * len(FIELDS), 4.2), layout="constrained")
    for axes, (name, label) in zip(fields, FIELDS.items(), strict=True):
        for colour, server in zip(COLOURS, dict.fromkeys(row["server"] for row in rows), strict=False):
            points = [(r["clients"], r[name]) for r in rows if r["server"] == server and r[name] is not None]
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=server) if points else None
        levels = sorted({row["clients"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.set_xlabel("clients")
        axes.set_ylabel(label)
        if name == FROM_ZERO:
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    fields[0].legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
