"""The demo's picture: speed side by side, head accuracies, and one answer with the guessed tokens marked."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

BLUE, GREY, ORANGE, MARK = "#2864a8", "#b8bec6", "#e08a1e", "#cfe3f8"
COLUMNS, LINES = 118, 16


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the report of ``serve.demo`` into a PNG file."""
    figure = pyplot.figure(figsize=(12, 7.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1.0, 0.95])
    _speeds(figure.add_subplot(grid[0, 0]), report)
    _accuracies(figure.add_subplot(grid[0, 1]), report)
    _answer(figure.add_subplot(grid[1, :]), report)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _speeds(axes: Axes, report: dict[str, Any]) -> None:
    names = {"transformers\ngenerate": "hf_tokens_per_s", "plain\n(this engine)": "plain_tokens_per_s"}
    speeds = [report[key] for key in names.values()]
    drafters = dict(reversed(report["drafters"].items()))
    speeds += [drafter["tokens_per_s"] for drafter in drafters.values()]
    ratios = [1 / report["plain_speedup_over_transformers"], 1.0, *(d["speedup"] for d in drafters.values())]
    labels = [f"{speed:.0f}\n{ratio:.2f}x" for speed, ratio in zip(speeds, ratios, strict=True)]
    ticks = {"prompt-lookup": "prompt\nlookup", "heads": "heads", "hybrid": "heads +\nlookup"}
    bars = axes.bar([*names, *(ticks[name] for name in drafters)], speeds, color=[GREY, GREY, *[BLUE] * 3], width=0.6)
    axes.bar_label(bars, labels, padding=3)
    axes.set_ylim(0, max(speeds) * 1.25)
    axes.set_ylabel("tokens per second")
    same = report["identical_outputs"]
    taus = ", ".join(f"{drafter['tokens_per_step']:.2f}" for drafter in drafters.values())
    axes.set_title(f"tokens per step: 1, 1, {taus}; {same['count']} of {same['total']} outputs identical", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _accuracies(axes: Axes, report: dict[str, Any]) -> None:
    heads = range(1, len(report["head_top1"]) + 1)
    for rank, colour in ((10, GREY), (5, ORANGE), (1, BLUE)):
        values = report[f"head_top{rank}"]
        axes.plot(heads, values, marker="o", color=colour, label=f"top {rank}")
        for head, value in zip(heads, values, strict=True):
            axes.annotate(f"{value:.2f}", (head, value), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xticks(list(heads), [f"head {k}\nt+{k + 1}" for k in heads])
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("held-out accuracy")
    axes.set_title("how often a head's best guesses hold the base's token\n(given the tokens before it)", fontsize=11)
    axes.legend(loc="lower left", frameon=False, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)


def _answer(axes: Axes, report: dict[str, Any]) -> None:
    """The sample answer in a grid of characters; guessed tokens have a coloured ground."""
    axes.set_axis_off()
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(LINES + 1, -1.6)
    question = report["sample"]["prompt"].replace("\n", " ")
    axes.text(
        0,
        -1,
        question if len(question) <= COLUMNS else f"{question[: COLUMNS - 3]}...",
        fontsize=10,
        weight="bold",
        parse_math=False,
    )
    row = column = 0
    for text, drafted in report["sample"]["pieces"]:
        for character in text:
            if character == "\n" or column >= COLUMNS:
                row, column = row + 1, 0
            if row >= LINES:
                return
            if character == "\n":
                continue
            if drafted:
                axes.add_patch(pyplot.Rectangle((column, row - 0.75), 1, 1, color=MARK, linewidth=0))
            axes.text(column + 0.5, row, character, family="monospace", fontsize=9.5, ha="center", va="baseline")
            column += 1
    axes.text(COLUMNS, LINES + 0.6, "coloured: guessed, and confirmed by the base", fontsize=9, ha="right")
