"""Pictures of the reports."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.decoding.scaling_picture import draw_scaling
from benchmarks.decoding.tables import REPLAYED, title
from benchmarks.decoding.tree_picture import draw_tree
from serve.demo.picture import BLUE, GREY, ORANGE

COLOURS = (BLUE, ORANGE, "#3a8f4d", "#8a4fa3", "#a83232", "#555555")


def draw(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report into a PNG file."""
    if report["kind"] == "tree":
        draw_tree(report, path)
        return
    if report["kind"] == "scaling":
        draw_scaling(report, path)
        return
    figure, axes = pyplot.subplots(figsize=(9, 5.2), layout="constrained")
    kinds = {"step": _draw_step, "replay": _draw_replay, "attention": _draw_attention, "tune": _draw_tune}
    kinds[report["kind"]](axes, report)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_step(axes: Any, report: dict[str, Any]) -> None:
    """Milliseconds against N: whole steps, verify alone (dashed), and the bound of each batch size (dotted)."""
    for colour, batch in zip(COLOURS * 9, sorted({row["batch"] for row in report["rows"]}), strict=False):
        rows = [row for row in report["rows"] if row["batch"] == batch]
        nodes = [row["nodes"] for row in rows]
        axes.plot(nodes, [row["step_ms"] for row in rows], "o-", color=colour, label=f"B = {batch}, whole step")
        axes.plot(nodes, [row["verify_ms"] for row in rows], "--", color=colour, label=f"B = {batch}, verify alone")
        axes.axhline(rows[0]["roofline_ms"], color=colour, linestyle=":", label=f"B = {batch}, bound of the memory")
    _finish_by_nodes(axes, report, "ms")


def _draw_attention(axes: Any, report: dict[str, Any]) -> None:
    """Milliseconds of a layer against N: every backend and batch size, and its bound (dotted)."""
    series = sorted({(row["batch"], row["backend"]) for row in report["rows"]})
    for colour, (batch, backend) in zip(COLOURS * 9, series, strict=False):
        rows = [row for row in report["rows"] if (row["batch"], row["backend"]) == (batch, backend)]
        nodes = [row["nodes"] for row in rows]
        axes.plot(nodes, [row["ms"] for row in rows], "o-", color=colour, label=f"B = {batch}, {backend}")
        axes.plot(nodes, [row["bound_ms"] for row in rows], ":", color=colour)
    axes.plot([], [], ":", color="black", label="bound of the memory")
    _finish_by_nodes(axes, report, "ms per layer")


def _finish_by_nodes(axes: Any, report: dict[str, Any], unit: str) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({row["nodes"] for row in report["rows"]})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N, tree nodes with the root (1 = plain decoding)")
    axes.set_ylabel(unit)
    axes.legend(frameon=False)
    axes.set_title(f"{title(report)}\nmemory {report['bandwidth_gb_per_s']:.1f} GB/s", fontsize=10)


def _draw_replay(axes: Any, report: dict[str, Any]) -> None:
    """Tokens per second, plain and replayed, per batch size."""
    rows = report["rows"]
    places = range(len(rows))
    plain = axes.bar(
        [p - 0.2 for p in places], [row["plain_tokens_per_s"] for row in rows], 0.38, color=GREY, label="plain"
    )
    replay = axes.bar(
        [p + 0.2 for p in places], [row["replay_tokens_per_s"] for row in rows], 0.38, color=BLUE, label="replay"
    )
    axes.bar_label(plain, fmt="{:.1f}", padding=2)
    axes.bar_label(replay, [f"{r['replay_tokens_per_s']:.1f}\n{r['replay_speedup']:.2f}x" for r in rows], padding=2)
    labels = [f"B = {r['batch']}, N = {r['nodes']}\n{r['replay_tokens_per_step']:.2f} tokens per step" for r in rows]
    axes.set_xticks(list(places), labels)
    axes.set_ylim(0, 1.2 * max(max(row["plain_tokens_per_s"], row["replay_tokens_per_s"]) for row in rows))
    axes.set_ylabel("tokens per second, whole batch")
    axes.legend(frameon=False)
    axes.set_title(f"{REPLAYED}\n{title(report)}", fontsize=10)


def _draw_tune(axes: Any, report: dict[str, Any]) -> None:
    """Speed over plain decoding against K, a line per drafter; what was found out as it runs as a dotted line."""
    rows = report["rows"]
    drafters = dict.fromkeys(row["drafter"] for row in rows if row["drafter"])
    for colour, drafter in zip(COLOURS * 9, drafters, strict=False):
        mine = [row for row in rows if row["drafter"] == drafter]
        axes.plot([row["k"] for row in mine], [row["speedup"] for row in mine], "o-", color=colour, label=drafter)
    auto = next(row["speedup"] for row in rows if row["name"] == "auto")
    axes.axhline(auto, color="black", linestyle=":", label="auto")
    axes.axhline(1.0, color=GREY, label="plain decoding")
    axes.set_xticks(sorted({row["k"] for row in rows if row["k"]}))
    axes.set_xlabel("K, most guesses per step")
    axes.set_ylabel("speed over plain decoding")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    rule = f"temperature {report['temperature']}" if report["temperature"] else "greedy"
    axes.set_title(f"{report['base']}, {report['dtype']}, {report['prompts']} prompts, {rule}", fontsize=10)
