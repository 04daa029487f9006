"""The benchmark as a picture: speed by method, by kind of prompt, and against the batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.run.methods import AUTO
from benchmarks.study.picture import COLOURS

SHOWN = 4
"""Methods by kind of prompt: the fastest ones."""


def draw(report: Mapping[str, Any], path: str | Path) -> None:
    """Draw a report into a PNG file."""
    first = report["runs"][0]
    batches = sorted({run["batch"] for run in report["runs"] if run["temperature"] == first["temperature"]})
    panels = [_draw_methods, *([_draw_kinds] if len(first["rows"][0]["kinds"]) > 1 else [])]
    panels += [_draw_batches] if len(batches) > 1 else []
    figure, fields = pyplot.subplots(len(panels), 1, figsize=(10, 4.4 * len(panels)), layout="constrained")
    for axes, panel in zip([fields] if len(panels) == 1 else fields, panels, strict=True):
        panel(axes, report)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report['base']}, {report['dtype']}, {report['device_name']}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_methods(axes: Any, report: Mapping[str, Any]) -> None:
    """Tokens per second with intervals, of the first run."""
    rows = sorted(report["runs"][0]["rows"], key=lambda row: row["tokens_per_s"]["value"])
    values = [row["tokens_per_s"] for row in rows]
    reach = [[v["value"] - v["low"] for v in values], [v["high"] - v["value"] for v in values]]
    colours = [COLOURS[0] if row["ours"] else "#b0b0b0" for row in rows]
    bars = axes.barh(
        [row["method"] for row in rows], [v["value"] for v in values], xerr=reach, color=colours, capsize=3
    )
    axes.bar_label(bars, [f"{v['value']:.0f}" for v in values], padding=6)
    axes.set_xlim(right=1.12 * max(value["high"] for value in values))
    axes.set_xlabel("tokens per second, whole calls, the first run; blue: this engine; 95 % intervals")


def _draw_kinds(axes: Any, report: Mapping[str, Any]) -> None:
    """Speed over plain decoding by kind, with the tokens per pass of the default above its bars."""
    rows = report["runs"][0]["rows"]
    ours = sorted((row for row in rows if row["ours"]), key=lambda row: -row["over_plain"]["value"])[:SHOWN]
    kinds, width = list(rows[0]["kinds"]), 0.8 / len(ours)
    for place, (row, colour) in enumerate(zip(ours, COLOURS, strict=False)):
        at = [index + (place - (len(ours) - 1) / 2) * width for index in range(len(kinds))]
        bars = axes.bar(
            at, [row["kinds"][kind]["over_plain"] for kind in kinds], width, color=colour, label=row["method"]
        )
        if row["method"] == AUTO:
            axes.bar_label(bars, [f"{row['kinds'][kind]['tokens_per_pass']:.1f}" for kind in kinds], fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds, rotation=20)
    axes.set_ylabel(f"speed over plain decoding\n(numbers: tokens per pass of {AUTO})")
    axes.legend(frameon=False, ncols=len(ours), loc="lower left", bbox_to_anchor=(0, 1))


def _draw_batches(axes: Any, report: Mapping[str, Any]) -> None:
    """Tokens per second of all sequences against the batch size."""
    temperature = report["runs"][0]["temperature"]
    runs = sorted((run for run in report["runs"] if run["temperature"] == temperature), key=lambda run: run["batch"])
    for colour, name in zip(COLOURS * 9, [row["method"] for row in runs[-1]["rows"]], strict=False):
        points = [
            (run["batch"], row["tokens_per_s"]["value"]) for run in runs for row in run["rows"] if row["method"] == name
        ]
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
    batches = [run["batch"] for run in runs]
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel("tokens per second, all sequences")
    axes.legend(frameon=False)
