"""The report as pictures: acceptance by depth, tokens per step and speedup against N; a line per variant."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

BLACK, GRID = "#222222", "#e6e8eb"
COLOURS = ("#2864a8", "#e08a1e", "#3a8f4d", "#8a4fa3", "#a83232", "#1a9aa0", "#b0568a", "#7a6a2f", "#5b6fd0", "#555555")
SHIFT = 0.03
"""Distance of the error bars of two lines, in ticks."""
Points = Sequence[tuple[float, float, float, float]]
"""x, value, low, high."""
PLAIN = (1.0, 1.0, 1.0, 1.0)
"""One node is plain decoding."""


def draw(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draw the report into PNG files of a directory; returns them."""
    figures, settings = report["figures"], report["settings"]
    names = {f"temperature {t:g}": str(t) for t in settings["temperatures"]}
    written = [directory / "acceptance.png", directory / "tokens_per_step.png"]
    fields = {title: {name: _depths(values[t]) for name, values in figures.items()} for title, t in names.items()}
    _draw(fields, written[0], "k, depth in the tree", "best token of head k is right where those before it are")
    fields = {title: _trees({name: values[t] for name, values in figures.items()}) for title, t in names.items()}
    _draw(fields, written[1], "N, tree nodes with the root", "tokens per step", doubling=True)
    if report["speed"]:
        written.append(directory / "speedup.png")
        title = f"greedy, one prompt at a time, {report['device']}"
        speeds = {name: _speeds(trees) for name, trees in report["speed"].items() if name in figures}
        _draw({title: speeds}, written[2], "N, tree nodes with the root", "speedup over plain decoding", doubling=True)
    return written


def _depths(values: Mapping[str, Any]) -> Points:
    return [(depth, *_bounds(estimate)) for depth, estimate in enumerate(values["acceptance"], 1)]


def _trees(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Points]:
    """Dynamic trees of each variant, from plain decoding on; static ones are points of their own."""
    lines: dict[str, Points] = {}
    static: dict[str, Points] = {}
    for name, figures in values.items():
        points = {tree: (_nodes(tree), *_bounds(e)) for tree, e in figures["tokens_per_step"].items()}
        lines[name] = [PLAIN, *(point for tree, point in points.items() if tree.startswith("dynamic"))]
        static |= {f"{name}, {tree}": [point] for tree, point in points.items() if tree.startswith("static")}
    return lines | static


def _speeds(trees: Mapping[str, Any]) -> Points:
    """Medians, and from the slowest to the fastest round."""
    dynamic = {tree: figures["speedups"] for tree, figures in trees.items() if tree.startswith("dynamic")}
    points = [(_nodes(tree), median(rounds), min(rounds), max(rounds)) for tree, rounds in dynamic.items()]
    return [PLAIN, *points]


def _bounds(estimate: Mapping[str, float]) -> tuple[float, float, float]:
    return estimate["value"], estimate["low"], estimate["high"]


def _nodes(tree: str) -> float:
    return float(tree.rpartition(" ")[2])


def _draw(
    fields: Mapping[str, Mapping[str, Points]], path: Path, below: str, beside: str, doubling: bool = False
) -> None:
    """One field beside the other, on one scale."""
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, row = pyplot.subplots(
            1, len(fields), figsize=(7 * len(fields), 5.4), layout="constrained", squeeze=False, sharey=True
        )
        figure.get_layout_engine().set(wspace=0.06)
        for axes, (title, lines) in zip(row[0], fields.items(), strict=True):
            _lines(axes, lines, doubling)
            axes.set_title(title, fontsize=10.5)
            axes.set_xlabel(below)
            _name_lines(axes, lines)
        row[0][0].set_ylabel(beside)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _lines(axes: Axes, lines: Mapping[str, Points], doubling: bool) -> None:
    """Lines with error bars, which stand beside each other; a single point is a diamond."""
    places = sorted({point[0] for points in lines.values() for point in points})
    if doubling:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    for number, (name, points) in enumerate(lines.items()):
        shift = SHIFT * (number - (len(lines) - 1) / 2)
        x, value, low, high = zip(*points, strict=True)
        shifts = [shift if most > least else 0 for least, most in zip(low, high, strict=True)]
        moved = [place * 2**by if doubling else place + by for place, by in zip(x, shifts, strict=True)]
        below = [max(0.0, v - least) for v, least in zip(value, low, strict=True)]
        above = [max(0.0, most - v) for v, most in zip(value, high, strict=True)]
        axes.errorbar(
            moved, value, [below, above], label=name, color=_colour(name, lines), linestyle="-" if number else "--",
            marker="o" if len(x) > 1 else "D", markersize=3.5 if len(x) > 1 else 6, linewidth=1.4, elinewidth=0.8,
        )  # fmt: skip
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _name_lines(axes: Axes, lines: Mapping[str, Points]) -> None:
    """A legend beside the field: names with their last values, the highest one first."""
    ends = {name: points[-1][1] for name, points in lines.items()}
    drawn = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda line: -ends[line[1]])
    labels = [f"{ends[name]:.2f}  {name}" for _, name in drawn]
    axes.legend([line for line, _ in drawn], labels, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _colour(name: str, lines: Mapping[str, Points]) -> str:
    """The baseline, which is the first line, is black, and so is its static tree."""
    place = list(lines).index(name)
    return BLACK if place == 0 or len(lines[name]) == 1 else COLOURS[(place - 1) % len(COLOURS)]
