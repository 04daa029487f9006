"""The demo's picture: speeds, head accuracies, and one answer with the drafted tokens marked."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from medusa.benchmarks.demo import AUTO

BLUE, GREY, ORANGE, MARK = "#2864a8", "#b8bec6", "#e08a1e", "#cfe3f8"
COLUMNS, LINES = 118, 16
KIND = "tokens_per_step_"
"""Prefix of keys of a drafter's figures by kind of prompt."""
TICKS = {"prompt-lookup": "prompt\nlookup", "heads": "heads", AUTO: "auto\n(default)"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the demo's report into a PNG file: the embedded base on the left, the real model on the right."""
    real = report.get("smollm2")
    sample = (real or report)["sample"]
    lines = _lines(sample["pieces"])
    with pyplot.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(figsize=(12, 8 + 0.2 * lines), layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=[1.0, 1.0, 0.2 + 0.055 * lines])
        wide = slice(None) if real is None else 0
        _speeds(figure.add_subplot(grid[0, wide]), "embedded base, 9M", report)
        _accuracies(figure.add_subplot(grid[1, wide]), report)
        if real is not None:
            _speeds(figure.add_subplot(grid[0, 1]), "SmolLM2-135M-Instruct", real)
            _kinds(figure.add_subplot(grid[1, 1]), real)
        _answer(figure.add_subplot(grid[2, :]), sample, lines)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _speeds(axes: Axes, base: str, report: dict[str, Any]) -> None:
    over, drafters = report["plain_speedup_over_transformers"], list(reversed(report["drafters"].items()))
    bars = [
        ("transformers\ngenerate", report["hf_tokens_per_s"], 1 / over, 1.0),
        ("plain\n(this engine)", report["plain_tokens_per_s"], 1.0, 1.0),
        *((TICKS[name], d["tokens_per_s"], d["speedup"], d["tokens_per_step"]) for name, d in drafters),
    ]
    names, speeds, ratios, steps = zip(*bars, strict=True)
    drawn = axes.bar(names, speeds, color=[GREY, GREY, *[BLUE] * len(drafters)], width=0.6)
    axes.bar_label(
        drawn, [f"{speed:.0f}\n{ratio:.2f}x" for speed, ratio in zip(speeds, ratios, strict=True)], padding=3
    )
    axes.bar_label(drawn, [f"{count:.2f}" for count in steps], label_type="center", color="white", fontsize=9)
    axes.set_ylim(0, max(speeds) * 1.25)
    axes.set_ylabel("tokens per second")
    same = report["identical_outputs"]
    axes.set_title(
        f"{base}: tokens/s, over plain; in bars: tokens per step\n"
        f"{same['count']} of {same['total']} outputs identical to plain decoding ({same['dtype']})",
        fontsize=10,
    )


def _kinds(axes: Axes, report: dict[str, Any]) -> None:
    """Tokens per step by kind of prompt: heads alone, and the fastest drafter."""
    rows = report["drafters"]
    kinds = [key.removeprefix(KIND) for key in rows["heads"] if key.startswith(KIND)]
    kinds.sort(key=lambda kind: float(rows[AUTO][KIND + kind]))
    for offset, (name, colour) in zip((0.2, -0.2), ((AUTO, BLUE), ("heads", ORANGE)), strict=True):
        values = [rows[name][KIND + kind] for kind in kinds]
        bars = axes.barh([y + offset for y in range(len(kinds))], values, height=0.38, color=colour, label=name)
        axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=2, fontsize=8)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axes.set_xlim(right=1.25 * axes.dataLim.xmax)  # leaves room for the legend
    axes.set_xlabel("tokens per step")
    axes.set_title("what was asked: some kinds are easier to guess", fontsize=10)
    axes.legend(loc="lower right", frameon=False)


def _accuracies(axes: Axes, report: dict[str, Any]) -> None:
    heads = range(1, len(report["head_top1"]) + 1)
    for rank, colour, above in ((10, GREY, 6), (5, ORANGE, -14), (1, BLUE, -14)):
        values = report[f"head_top{rank}"]
        axes.plot(heads, values, marker="o", color=colour, label=f"top {rank}")
        for head, value in zip(heads, values, strict=True):
            axes.annotate(
                f"{value:.2f}", (head, value), (0, above), textcoords="offset points", ha="center", fontsize=9
            )
    axes.set_xticks(list(heads), [f"head {k}\nt+{k + 1}" for k in heads])
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("held-out accuracy")
    axes.set_title("embedded base: how often a head's best guesses hold the base's token", fontsize=10)
    axes.legend(loc="upper right", frameon=False, ncols=3)


def _lines(pieces: list[tuple[str, bool]]) -> int:
    """Number of lines of the sample answer, at most ``LINES``."""
    text = "".join(piece for piece, _ in pieces).rstrip("\n")
    return min(LINES, sum(max(1, -(-len(line) // COLUMNS)) for line in text.split("\n")))


def _answer(axes: Axes, sample: dict[str, Any], lines: int) -> None:
    """Draw the sample answer in a grid of characters; drafted tokens have a coloured background."""
    axes.set_axis_off()
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(lines + 1, -1.6)
    question = sample["prompt"].replace("\n", " ")
    question = question if len(question) <= COLUMNS else f"{question[: COLUMNS - 3]}..."
    axes.text(0, -1, question, fontsize=10, weight="bold", parse_math=False)
    row = column = 0
    for text, drafted in sample["pieces"]:
        for character in text:
            if character == "\n" or column >= COLUMNS:
                row, column = row + 1, 0
            if row >= lines:
                return
            if character == "\n":
                continue
            if drafted:
                axes.add_patch(pyplot.Rectangle((column, row - 0.75), 1, 1, color=MARK, linewidth=0))
            axes.text(column + 0.5, row, character, family="monospace", fontsize=9.5, ha="center", va="baseline")
            column += 1
    axes.text(COLUMNS, lines + 0.6, "coloured: guessed, and confirmed by the base", fontsize=9, ha="right")
