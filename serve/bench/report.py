"""What every benchmark says beside its figures, and how it is shown."""

import importlib.metadata
import json
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device, words: Sequence[str]) -> dict[str, Any]:
    """The command, the machine and the versions that figures belong to."""
    cuda = device.type == "cuda"
    packages = ("torch", "transformers", "triton")
    return {
        "command": shlex.join(["medusa-bench", *words]),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": None if cuda else torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def write_json(report: dict[str, Any], path: str | Path) -> None:
    """The report as one file."""
    Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def show(report: dict[str, Any]) -> None:
    """Print a report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, headings, rows in TABLES[report["kind"]](report):
        table = Table(title=title, title_justify="left")
        for heading in headings:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)


Tables = list[tuple[str, Sequence[str], list[Sequence[object]]]]


def title(report: dict[str, Any]) -> str:
    """One line: what was measured, and where."""
    ways = (", LOSSY int8 weights" if report.get("int8") else "") + (", compiled" if report.get("compiled") else "")
    ways += ", steps as graphs" if report.get("graph") else ""
    threads = f", {report['threads']} threads" if report["threads"] else ""
    return (
        f"{report['base']} ({report['weights']} weights), {report['dtype']}{ways}, {report['device_name']}{threads},"
        f" {report['context']} cached tokens"
    )


def _step_tables(report: dict[str, Any]) -> Tables:
    headings = ("B", "N", "verify ms", "over N = 1", "step ms", "over N = 1", "rows/s", "bound ms", "of bandwidth")
    rows: list[Sequence[object]] = [
        (
            row["batch"],
            row["nodes"],
            f"{row['verify_ms']:.2f}",
            f"{row['verify_overhead']:.2f}x",
            f"{row['step_ms']:.2f}",
            f"{row['step_overhead']:.2f}x",
            f"{row['rows_per_s']:.0f}",
            f"{row['roofline_ms']:.2f}",
            f"{row['roofline_share']:.0%}",
        )
        for row in report["rows"]
    ]
    bound = f"memory: {report['bandwidth_gb_per_s']:.1f} GB/s ({report['bandwidth_method']})"
    tables: Tables = [(f"step: {title(report)}; {bound}", headings, rows)]
    if "baseline" in report:
        base = [
            (
                b["batch"],
                b["transformers_tokens_per_s"],
                b["plain_tokens_per_s"],
                f"{b['plain_over_transformers']:.2f}x",
            )
            for b in report["baseline"]
        ]
        names = ("B", "transformers generate, tokens/s", "plain, this engine, tokens/s", "over transformers generate")
        tables.append(("the other baseline", names, list(base)))
    if "profile" in report:
        profile = report["profile"]
        shares = [(name[:60], f"{share:.1%}") for name, share in profile["shares"].items()]
        tables.append(
            (
                f"a plain step of {profile['profiled_step_ms']:.2f} ms under the profiler",
                ("operator", "share"),
                list(shares),
            )
        )
    if "memory" in report:
        marks = [tuple(f"{value:,}" for value in mark.values()) for mark in report["memory"]]
        names = tuple(name.replace("_", " ") for name in report["memory"][0])
        tables.append(("memory after many steps", names, list(marks)))
    return tables


def _replay_tables(report: dict[str, Any]) -> Tables:
    headings = (
        "B",
        "N",
        "tokens per step (replay)",
        "plain tokens/s",
        "replay tokens/s",
        "step overhead",
        "replay speedup",
        "clamped",
    )
    rows: list[Sequence[object]] = [
        (
            row["batch"],
            row["nodes"],
            f"{row['replay_tokens_per_step']:.2f}",
            row["plain_tokens_per_s"],
            row["replay_tokens_per_s"],
            f"{row['step_overhead']:.2f}x",
            f"{row['replay_speedup']:.2f}x",
            f"{row['clamped_steps']} of {row['steps'] * row['batch']}",
        )
        for row in report["rows"]
    ]
    return [(f"REPLAY of an acceptance trace, not an acceptance of this shape: {title(report)}", headings, rows)]


def _attention_tables(report: dict[str, Any]) -> Tables:
    headings = ("backend", "B", "N", "", "ms per layer", "bound ms", "of bandwidth")
    rows: list[Sequence[object]] = [
        (
            row["backend"],
            row["batch"],
            row["nodes"],
            row["mode"],
            f"{row['ms']:.4f}",
            f"{row['bound_ms']:.4f}",
            f"{row['share_of_bound']:.0%}",
        )
        for row in report["rows"]
    ]
    missing = "".join(f"; without {name}: {reason}" for name, reason in report["missing"].items())
    bound = f"memory: {report['bandwidth_gb_per_s']:.1f} GB/s ({report['bandwidth_method']})"
    return [(f"attention: {title(report)}; {bound}{missing}", headings, rows)]


def _nodes_tables(report: dict[str, Any]) -> Tables:
    headings = ("nodes", "tokens/s", "tokens per step", "speedup over plain")
    rows: list[Sequence[object]] = [
        (row["nodes"], row["tokens_per_s"], f"{row['tokens_per_step']:.2f}", f"{row['speedup']:.2f}x")
        for row in report["rows"]
    ]
    what = f"{report['drafter']}, heads: {report['heads']}, {report['prompts']} prompts, {report['device_name']}"
    versus = f"auto is {report['auto_over_best_fixed']:.3f}x of the best fixed size ({report['best_fixed']})"
    return [(f"nodes: {what}; {versus}; {report['auto']}", headings, rows)]


def _tree_tables(report: dict[str, Any]) -> Tables:
    headings = ("N", "static, predicted", "static", "dynamic", "dynamic / static")
    rows: list[Sequence[object]] = [
        (
            row["nodes"],
            f"{row['predicted']:.3f}",
            f"{row['static']:.3f}",
            f"{row['dynamic']:.3f}",
            f"{row['dynamic_over_static']:.3f}x",
        )
        for row in report["rows"]
    ]
    what = f"{report['heads']} heads of {report['base']}, {report['dtype']}, {report['prompts']} prompts"
    return [(f"tree: tokens per step at equal N, greedy; {what}", headings, rows)]


TABLES = {
    "step": _step_tables, "replay": _replay_tables, "tree": _tree_tables, "nodes": _nodes_tables,
    "attention": _attention_tables,
}  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
