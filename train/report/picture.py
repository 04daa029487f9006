"""The report as a picture: six panels over the steps of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

BLUE, GREY, ORANGE, BLACK, GRID = "#2864a8", "#9aa2ac", "#e08a1e", "#222222", "#e6e8eb"
LEGEND = {"frameon": False, "fontsize": 8.5}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw the result of `read_report` into a PNG file."""
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, grid = pyplot.subplots(2, 3, figsize=(14, 7.8), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12)
        for panel, axes in zip((_loss, _accuracy, _heldout, _served, _rate, _speed), grid.flat, strict=True):
            panel(axes, report["curves"], report["evaluations"], report)
        totals = report["totals"]
        recipe = ", ".join(f"{name} {value}" for name, value in report["recipe"].items() if name != "data")
        done = f"{totals['steps']:,} steps = {totals['epochs']:.2f} epochs in {_duration(totals['train_seconds'])}"
        figure.suptitle(f"{report['run']}: {done}\n{recipe}".replace("$", r"\$"), fontsize=11)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _loss(axes: Axes, curves: Any, _: Any, report: Mapping[str, Any]) -> None:
    for head, (values, colour) in enumerate(_per_head(curves["head_loss"]), start=1):
        axes.plot(curves["step"], values, color=colour, linewidth=1.4, label=f"head {head}")
    axes.plot(curves["step"], curves["loss"], color=BLACK, linewidth=1.8, linestyle="--", label="weighted sum")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    unit = "total variation distance" if report["recipe"].get("loss") == "tv" else "nats per token"
    _over_steps(axes, "training loss", unit)
    axes.legend(ncols=2, **LEGEND)


def _accuracy(axes: Axes, curves: Any, evaluations: Any, _: Any) -> None:
    for values, colour in _per_head(curves["head_top1"]):
        axes.plot(curves["step"], values, color=colour, linewidth=1.2, alpha=0.75)
    steps = [record["step"] for record in evaluations]
    for values, colour in _per_head([record["heldout_top1"] for record in evaluations]):
        axes.plot(steps, values, color=colour, marker="o", markersize=5.5, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    _over_steps(axes, "top-1 of each head: training (lines), held-out (dots)", "share of tokens")


def _heldout(axes: Axes, _: Any, evaluations: Any, __: Any) -> None:
    if not evaluations:
        _empty(axes, "held-out accuracy", "no evaluation yet: data.heldout, evaluate.every_steps")
        return
    last = evaluations[-1]
    heads = range(1, len(last["heldout_top1"]) + 1)
    for rank, colour, offset in ((10, GREY, 6), (5, ORANGE, 0), (1, BLUE, -14)):
        values = last[f"heldout_top{rank}"]
        axes.plot(heads, values, marker="o", color=colour, label=f"top {rank}")
        for head, value in zip(heads, values, strict=True) if offset else ():
            _mark(axes, head, value, offset)
    _over_steps(axes, f"held-out accuracy at step {last['step']:,}", "share of tokens")
    axes.set_xlabel("head (head k guesses token t+1+k)")
    axes.set_xticks(list(heads))
    axes.set_ylim(0, 1.1)
    axes.legend(ncols=3, loc="upper right", **LEGEND)


def _served(axes: Axes, _: Any, evaluations: Any, __: Any) -> None:
    name = "heldout_tokens_per_step"
    served = [(record["step"], record[name]) for record in evaluations if name in record]
    if not served:
        _empty(axes, "served tokens per step", "not measured: evaluate.prompts")
        return
    axes.plot(*zip(*served, strict=True), marker="o", color=BLUE)
    for step, value in served[:: max(1, len(served) // 8)]:
        _mark(axes, step, value, 7)
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.text(0.01, 1.0, "plain decoding", transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)
    axes.set_ylim(0.9, 1.12 * max(value for _, value in served))
    axes.set_xlim(0, None)
    _over_steps(axes, "held-out prompts, decoded with the heads", "tokens per step (served)")


def _rate(axes: Axes, curves: Any, _: Any, __: Any) -> None:
    axes.plot(curves["step"], curves["lr"], color=BLUE)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylim(bottom=0)
    _over_steps(axes, "learning rate (heads)", "learning rate")


def _speed(axes: Axes, curves: Any, _: Any, report: Mapping[str, Any]) -> None:
    speeds, mean = curves["useful_tokens_per_s"], report["totals"]["useful_tokens_per_s"]
    axes.plot(curves["step"], speeds, color=BLUE, linewidth=1.2)
    axes.axhline(mean, color=GREY, linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _over_steps(axes, f"useful tokens per second (mean {mean:,.0f}, dashed)", "supervised tokens / s")


def _per_head(values_PK: Sequence[Sequence[float]]) -> list[tuple[tuple[float, ...], Any]]:
    """One curve and one colour per head, dark for near and light for far heads; safe for colour-blind readers."""
    curves = list(zip(*values_PK, strict=True))
    shades = matplotlib.colormaps["viridis"]
    return [(curve, shades(0.85 * index / max(1, len(curves) - 1))) for index, curve in enumerate(curves)]


def _mark(axes: Axes, x: float, value: float, points: float) -> None:
    """Write a value above or below its place."""
    axes.annotate(f"{value:.2f}", (x, value), (0, points), textcoords="offset points", ha="center", fontsize=8)


def _over_steps(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10.5)
    axes.set_ylabel(unit)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _empty(axes: Axes, title: str, why: str) -> None:
    axes.set_axis_off()
    axes.set_title(title, fontsize=10.5)
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=BLACK, fontsize=9)
