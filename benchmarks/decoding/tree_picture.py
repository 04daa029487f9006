"""The picture of ``medusa-bench tree``: a tree with its survival probabilities, and tokens per step against N."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from serve.demo.picture import BLUE, GREY, ORANGE

Ranks = tuple[int, ...]
GROUND, DARK = 0.12, 0.55
"""Shades of blue of a node that hardly survives, and above which its text is white."""


def draw_tree(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report into a PNG file."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(17, 7.5), width_ratios=[2.6, 1], layout="constrained")
    _draw_topology(left, report["tree"])
    _draw_sizes(right, report["rows"])
    figure.suptitle(
        f"{report['heads']} heads of {report['base']}, {report['dtype']}, greedy, {report['prompts']} held-out prompts",
        fontsize=12,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def layout(paths: list[Ranks]) -> dict[Ranks, float]:
    """Where nodes stand in their row: leaves side by side from 0 on, parents above the middle of their children."""
    children: dict[Ranks, list[Ranks]] = {(): [], **{path: [] for path in paths}}
    for path in paths:
        children[path[:-1]].append(path)
    places: dict[Ranks, float] = {}

    def place(path: Ranks, first: int) -> int:
        """Place what hangs below ``path`` from column ``first`` on; returns the next free column."""
        end = first
        for child in children[path]:
            end = place(child, end)
        below = [places[child] for child in children[path]]
        places[path] = (below[0] + below[-1]) / 2 if below else first
        return max(end, first + 1)

    place((), 0)
    return places


def _draw_topology(axes: Any, tree: dict[str, Any]) -> None:
    """Nodes with their token's rank inside and their survival below; the root is certain."""
    paths = [tuple(path) for path in tree["paths"]]
    survivals: dict[Ranks, float] = {(): 1.0, **dict(zip(paths, tree["survivals"], strict=True))}
    places = layout(paths)
    shades = pyplot.get_cmap("Blues")
    for path in paths:
        ends = [(places[node], -len(node)) for node in (path[:-1], path)]
        axes.plot(*zip(*ends, strict=True), color=GREY, linewidth=0.6 + 4 * survivals[path], zorder=1)
    for path, survival in survivals.items():
        shade, at = GROUND + (1 - GROUND) * survival**0.5, (places[path], -len(path))
        size = 130 + 500 * survival
        axes.scatter(*at, s=size, color=shades(shade), edgecolors=BLUE, linewidths=0.7, zorder=2)
        name = str(path[-1] + 1) if path else "root"
        axes.text(*at, name, size=7.5, ha="center", va="center", color="white" if shade > DARK else "black", zorder=3)
        percent = f"{100 * survival:.{1 if survival < 0.1 else 0}f}"
        axes.annotate(
            percent, at, (0, -3 - size**0.5 / 2), textcoords="offset points", size=6.5, ha="center", va="top", zorder=3,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip
    levels = range(tree["depth"] + 1)
    axes.set_yticks([-level for level in levels], [f"head {level}" if level else "root" for level in levels])
    axes.set_ylim(-tree["depth"] - 0.5, 0.4)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"the best static tree of {tree['nodes']} nodes: {tree['tokens_per_step']:.2f} tokens per step expected\n"
        "in a node: its token's rank, 1 = the head's best; below it: percent of steps in which it is accepted",
        fontsize=10,
    )


def _draw_sizes(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Tokens per step against N."""
    sizes = [row["nodes"] for row in rows]
    for key, label, style, colour in (
        ("dynamic", "dynamic tree, measured", "o-", ORANGE),
        ("static", "best static tree, measured", "o-", BLUE),
        ("predicted", "best static tree, predicted", "x--", BLUE),
    ):
        axes.plot(sizes, [row[key] for row in rows], style, color=colour, label=label)
    for row in rows:
        for key, offset in (("dynamic", 8), ("static", -15)):
            axes.annotate(
                f"{row[key]:.2f}", (row["nodes"], row[key]), (0, offset), textcoords="offset points", size=8.5,
                ha="center",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_ylim(bottom=0.8)
    axes.set_xlabel("N, tree nodes with the root (1 = plain decoding)")
    axes.set_ylabel("tokens per step")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("at equal N", fontsize=10)
