"""The report as pictures: acceptance by depth, tokens per step and speedup against N; a line per variant."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

BLACK, GREY, GRID = "#222222", "#9aa2ac", "#e6e8eb"
COLOURS = ("#2864a8", "#e08a1e", "#3a8f4d", "#8a4fa3", "#a83232", "#1a9aa0", "#b0568a", "#7a6a2f", "#5b6fd0", "#555555")
LABEL_GAP = 0.045
"""Smallest distance of two labels / height of the field."""
Points = Sequence[tuple[float, float, float, float]]
"""x, value, low, high."""


def draw(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draw the report into PNG files of a directory; returns those that were written."""
    figures, temperatures = report["figures"], [str(t) for t in report["settings"]["temperatures"]]
    drawn = [directory / "acceptance.png", directory / "tokens_per_step.png"]
    fields = {f"temperature {float(t):g}": {name: _depths(v[t]) for name, v in figures.items()} for t in temperatures}
    _draw(fields, drawn[0], "depth k in the tree", "head k is right where heads 1 .. k-1 were")
    fields = {f"temperature {float(t):g}": {name: _trees(v[t]) for name, v in figures.items()} for t in temperatures}
    static = {f"temperature {float(t):g}": _static(next(iter(figures.values()))[t]) for t in temperatures}
    _draw(fields, drawn[1], "N, tree nodes with the root", "tokens per step", static, doubling=True)
    if report["speed"]:
        drawn.append(directory / "speedup.png")
        speeds = {name: _speeds(trees) for name, trees in report["speed"].items() if name in figures}
        title = f"greedy, one prompt at a time, {report['device']}"
        _draw({title: speeds}, drawn[2], "N, tree nodes with the root", "speedup over plain decoding", doubling=True)
    return drawn


def _depths(values: Mapping[str, Any]) -> Points:
    return [(depth, *_bounds(estimate)) for depth, estimate in enumerate(values["acceptance"], 1)]


def _trees(values: Mapping[str, Any]) -> Points:
    dynamic = {tree: e for tree, e in values["tokens_per_step"].items() if tree.startswith("dynamic")}
    return [(1.0, 1.0, 1.0, 1.0), *((_nodes(tree), *_bounds(estimate)) for tree, estimate in dynamic.items())]


def _static(values: Mapping[str, Any]) -> Points:
    static = {tree: e for tree, e in values["tokens_per_step"].items() if tree.startswith("static")}
    return [(_nodes(tree), *_bounds(estimate)) for tree, estimate in static.items()]


def _speeds(trees: Mapping[str, Any]) -> Points:
    """Medians, and from the slowest to the fastest round."""
    dynamic = {tree: figures["speedups"] for tree, figures in trees.items() if tree.startswith("dynamic")}
    return [
        (1.0, 1.0, 1.0, 1.0),
        *((_nodes(tree), median(rounds), min(rounds), max(rounds)) for tree, rounds in dynamic.items()),
    ]


def _bounds(estimate: Mapping[str, float]) -> tuple[float, float, float]:
    return estimate["value"], estimate["low"], estimate["high"]


def _nodes(tree: str) -> float:
    return float(tree.rpartition(" ")[2])


def _draw(
    fields: Mapping[str, Mapping[str, Points]],
    path: Path,
    below: str,
    beside: str,
    static: Mapping[str, Points] | None = None,
    doubling: bool = False,
) -> None:
    """One field beside the other, on one scale; static points belong to the first line of their field."""
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, row = pyplot.subplots(
            1, len(fields), figsize=(6.6 * len(fields) + 0.6, 5.4), layout="constrained", squeeze=False, sharey=True
        )
        for axes, (title, lines) in zip(row[0], fields.items(), strict=True):
            _lines(axes, lines, doubling)
            for x, value, low, high in (static or {}).get(title, ()):
                axes.errorbar(x, value, [[value - low], [high - value]], fmt="D", color=BLACK, markersize=6, capsize=3)
                axes.annotate(
                    "static tree", (x, value), (-9, 9), textcoords="offset points", ha="right", color=BLACK, fontsize=9
                )
            axes.set_title(title, fontsize=10.5)
            axes.set_xlabel(below)
        row[0][0].set_ylabel(beside)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _lines(axes: Axes, lines: Mapping[str, Points], doubling: bool) -> None:
    """Lines with error bars, named where they end; the first one, the baseline, is black and dashed."""
    places = sorted({point[0] for points in lines.values() for point in points})
    if doubling:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    for (name, points), colour in zip(lines.items(), (BLACK, *COLOURS * len(lines)), strict=False):
        x, value, low, high = zip(*points, strict=True)
        bars = [
            [v - least for v, least in zip(value, low, strict=True)],
            [most - v for v, most in zip(value, high, strict=True)],
        ]
        style = "--" if colour == BLACK else "-"
        axes.errorbar(x, value, bars, color=colour, linestyle=style, marker="o", markersize=3.5, linewidth=1.5,
                      elinewidth=0.9, capsize=2, label=name)  # fmt: skip
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    _name_lines(axes, lines)


def _name_lines(axes: Axes, lines: Mapping[str, Points]) -> None:
    """Write each name beside the end of its line, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = sorted((points[-1][1], name) for name, points in lines.items())
    heights = spread([(value - low) / (high - low) for value, _ in ends], LABEL_GAP)
    colours = dict(zip(lines, (BLACK, *COLOURS * len(lines)), strict=False))
    for (value, name), height in zip(ends, heights, strict=True):
        axes.annotate(
            f"{name}  {value:.2f}",
            (1.02, height),
            xycoords="axes fraction",
            va="center",
            color=colours[name],
            fontsize=9,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as it takes to stand ``gap`` apart, around where they were."""
    groups: list[list[float]] = []  # sum of (height - its place in the group), number of members
    for height in heights:
        groups.append([height, 1.0])
        while len(groups) > 1 and _top(groups[-2], gap) + gap > _bottom(groups[-1], gap):
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    return [_bottom(group, gap) + place * gap for group in groups for place in range(int(group[1]))]


def _bottom(group: Sequence[float], gap: float) -> float:
    """Height of the lowest member of a group that stands around the mean of where its members were."""
    total, count = group
    return total / count - (count - 1) * gap / 2


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + (group[1] - 1) * gap
