"""The benchmark's report as tables: on the screen, and as Markdown."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.run.methods import LOSSY

WIDTH = 180
"""Columns where the output is no terminal."""
HEADINGS = ("method", "tokens/s", "95 %", "over plain", "95 %", "per pass", "equal to plain")
Row = Sequence[str]


def show(report: Mapping[str, Any]) -> None:
    """Print all tables; the one of all runs comes last."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for title, headings, rows in (*_by_kind(report), *_tables(report), *_summary(report)):
        table = Table(title=title)
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def markdown(report: Mapping[str, Any]) -> str:
    """The same, with the command and the machine."""
    machine = f"{report['device_name']}, {report['threads']} threads, {report['dtype']}"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    parts = [f"`{report['command']}`", f"{machine}; {versions}."]
    for title, headings, rows in (*_summary(report), *_tables(report), *_by_kind(report)):
        lines = [headings, ["---"] * len(headings), *rows]
        parts += [f"**{title}**", "\n".join(f"| {' | '.join(cells)} |" for cells in lines)]
    return "\n\n".join(parts) + "\n"


def _summary(report: Mapping[str, Any]) -> Sequence[tuple[str, Row, Sequence[Row]]]:
    """One table of all runs, where there are several."""
    runs = report["runs"]
    if len(runs) < 2:
        return []
    columns = [{row["method"]: row for row in run["rows"]} for run in runs]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [_name(next(column[name] for column in columns if name in column))]
        for column in columns:
            row = column.get(name)
            speed = f"{row['tokens_per_s']['value']:.0f} ({row['over_plain']['value']:.2f}x)" if row else ""
            cells.append(speed)
        rows.append(cells)
    title = f"{report['base']}: tokens/s (over plain decoding of this engine), {report['prompts']} prompts"
    return [(title, ("method", *(f"{_rule(run)}, batch {run['batch']}" for run in runs)), rows)]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['method']} (LOSSY)" if row["method"].endswith(f":{LOSSY}") else str(row["method"])


def _tables(report: Mapping[str, Any]) -> Sequence[tuple[str, Row, Sequence[Row]]]:
    """A table for each rule and batch size."""
    found = []
    for run in report["runs"]:
        title = f"{report['base']}: {report['prompts']} prompts, {_rule(run)}, batch {run['batch']}"
        found.append((title, HEADINGS, [_cells(row, run["temperature"]) for row in run["rows"]]))
    return found


def _cells(row: Mapping[str, Any], temperature: float) -> Row:
    speed, over, per_pass = row["tokens_per_s"], row["over_plain"], row["tokens_per_pass"]
    comparable = row["ours"] or not temperature  # others draw other random numbers
    return (
        _name(row),
        f"{speed['value']:.1f}",
        f"{speed['low']:.0f} to {speed['high']:.0f}",
        f"{over['value']:.2f}x",
        f"{over['low']:.2f} to {over['high']:.2f}",
        "" if per_pass is None else f"{per_pass:.2f}",
        f"{row['identical']} of {row['prompts']}" if comparable else "",
    )


def _by_kind(report: Mapping[str, Any]) -> Sequence[tuple[str, Row, Sequence[Row]]]:
    """Speed over plain decoding and tokens per pass by kind of prompt, a table for each rule."""
    found = []
    for run in report["runs"]:
        kinds = list(run["rows"][0]["kinds"])
        if len(kinds) < 2:
            continue
        rows = []
        for row in run["rows"]:
            cells = [_name(row)]
            for kind in kinds:
                figures = row["kinds"][kind]
                per_pass = figures["tokens_per_pass"]
                cells.append(f"{figures['over_plain']:.2f}x" + ("" if per_pass is None else f" ({per_pass:.2f})"))
            rows.append(cells)
        title = f"speed over plain decoding (tokens per pass) by kind of prompt, {_rule(run)}"
        found.append((title, ("method", *kinds), rows))
    return found


def _rule(run: Mapping[str, Any]) -> str:
    return f"temperature {run['temperature']:g}" if run["temperature"] else "greedy"
