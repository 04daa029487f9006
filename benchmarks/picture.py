"""Draws reports: lines, or bars side by side, in one or several fields."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = ("#2864a8", "#e08a1e", "#3a8f4d", "#8a4fa3", "#a83232", "#1a9aa0", "#b0568a", "#7a6a2f", "#5b6fd0", "#555555")
BARS = 0.8
"""Width of a group of bars."""
MOST_SIDEWAYS = 8
"""Most names below bars that have room beside each other."""


class Line(NamedTuple):
    """The points of a line, or the bars of a series, whose ``x`` are names."""

    x: Sequence[Any]
    y: Sequence[float]
    style: str = "o-"
    reach: Sequence[tuple[float, float]] | None = None
    """Lower and upper end of the interval of each point or bar."""


class Field(NamedTuple):
    """One pair of axes."""

    lines: Mapping[str, Line]
    below: str
    beside: str
    bars: bool = False
    stacked: bool = False
    """Bars with the same name are stacked, as shares of a whole."""
    doubling: bool = False
    """The horizontal axis is logarithmic, with a tick for each value."""
    from_zero: bool = True
    """Whether the vertical axis begins at 0; otherwise it is logarithmic."""


def draw(title: str, fields: Sequence[Field], path: str | Path, columns: int = 1) -> None:
    """Draw fields into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(fields) // columns)
    figure, places = pyplot.subplots(
        rows, columns, figsize=(max(9, 5 * columns), 4.4 * rows), layout="constrained", squeeze=False
    )
    for axes, field in zip(places.flat, fields, strict=False):
        (_draw_bars if field.bars else _draw_lines)(axes, field)
        axes.set_xlabel(field.below)
        axes.set_ylabel(field.beside)
        axes.spines[["top", "right"]].set_visible(False)
        if len(field.lines) > 1:
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title, fontsize=10, wrap=True)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _draw_lines(axes: Any, field: Field) -> None:
    for place, (name, line) in enumerate(field.lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(line.x, line.y, line.style, color=colour, label=name, markersize=4)
        if line.reach is not None:
            axes.fill_between(line.x, *zip(*line.reach, strict=True), color=colour, alpha=0.15, linewidth=0)
    ticks = sorted({x for line in field.lines.values() for x in line.x})
    if all(isinstance(tick, int) for tick in ticks):
        axes.set_xticks(ticks)
    if field.doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(bottom=0) if field.from_zero else axes.set_yscale("log")


def _draw_bars(axes: Any, field: Field) -> None:
    names = list(dict.fromkeys(x for line in field.lines.values() for x in line.x))
    width, below = BARS if field.stacked else BARS / len(field.lines), [0.0] * len(names)
    for place, (name, line) in enumerate(field.lines.items()):
        shift = 0 if field.stacked else (place - (len(field.lines) - 1) / 2) * width
        ends = None
        if line.reach is not None:
            pairs = list(zip(line.y, line.reach, strict=True))
            ends = [[y - low for y, (low, _) in pairs], [high - y for y, (_, high) in pairs]]
        own = [names.index(x) for x in line.x]
        bars = axes.bar(
            [at + shift for at in own],
            line.y,
            width,
            [below[at] for at in own],
            color=COLOURS[place % len(COLOURS)],
            label=name,
            yerr=ends,
        )
        if field.stacked:
            for at, y in zip(own, line.y, strict=True):
                below[at] += y
        if len(field.lines) == 1:
            axes.bar_label(bars, fmt=lambda y: f"{y:.3g}" if y < 100 else f"{y:.0f}", padding=3)
    upright = len(names) > MOST_SIDEWAYS
    axes.set_xticks(range(len(names)), names, rotation=90 if upright else 25, ha="center" if upright else "right")
