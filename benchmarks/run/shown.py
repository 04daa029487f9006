"""The output of ``medusa bench run`` and ``tune``: tables, and fields of a picture."""

from collections.abc import Mapping
from typing import Any

from medusa.benchmarks.picture import Field, Line
from medusa.benchmarks.report import Report, Table, machine, rounding
from medusa.benchmarks.run.methods import LOSSY

HEADINGS = ("method", "tokens/s", "95 %", "over plain", "95 %", "per pass", "equal to plain")
DRAWN = 4
"""Number of methods in the picture by kind of prompt; the fastest ones."""


def tables(report: Report) -> list[Table]:
    """Tables by kind of prompt, then for each rule and batch size, and last for all runs."""
    found = [_by_kind(report, run) for run in report["runs"] if len(run["rows"][0]["kinds"]) > 1]
    found += [_one(report, run) for run in report["runs"]]
    return [*found, *([_all(report)] if len(report["runs"]) > 1 else [])]


def _one(report: Report, run: Mapping[str, Any]) -> Table:
    title = f"{report['base']}: {report['prompts']} prompts, {_rule(run)}, batch {run['batch']}; {machine(report)}"
    title += rounding(report)
    if "best" in report:
        best = f"{report['auto_over_best']:.3f}x of the best fixed method ({report['best']})"
        title += f"\nauto is {best}; {report['auto']}"
    return Table(title, HEADINGS, [_cells(row, run["temperature"]) for row in run["rows"]])


def _cells(row: Mapping[str, Any], temperature: float) -> list[str]:
    speed, over, per_pass = row["tokens_per_s"], row["over_plain"], row["tokens_per_pass"]
    comparable = row["ours"] or not temperature  # other engines use other random numbers
    return [
        _name(row),
        f"{speed['value']:.1f}",
        f"{speed['low']:.0f} to {speed['high']:.0f}",
        f"{over['value']:.2f}x",
        f"{over['low']:.2f} to {over['high']:.2f}",
        "" if per_pass is None else f"{per_pass:.2f}",
        f"{row['identical']} of {row['prompts']}" if comparable else "",
    ]


def _by_kind(report: Report, run: Mapping[str, Any]) -> Table:
    kinds = list(run["rows"][0]["kinds"])
    cells = []
    for row in run["rows"]:
        values = [row["kinds"][kind] for kind in kinds]
        per_pass = ["" if v["tokens_per_pass"] is None else f" ({v['tokens_per_pass']:.2f})" for v in values]
        speeds = [f"{v['over_plain']:.2f}x{count}" for v, count in zip(values, per_pass, strict=True)]
        cells.append([_name(row), *speeds])
    title = f"{report['base']}: speed over plain decoding (tokens per pass) by kind of prompt, {_rule(run)}"
    return Table(title, ("method", *kinds), cells)


def _all(report: Report) -> Table:
    columns = [{row["method"]: row for row in run["rows"]} for run in report["runs"]]
    cells = []
    for name in dict.fromkeys(name for column in columns for name in column):
        rows = [column.get(name) for column in columns]
        speeds = [f"{r['tokens_per_s']['value']:.0f} ({r['over_plain']['value']:.2f}x)" if r else "" for r in rows]
        cells.append([next(_name(row) for row in rows if row), *speeds])
    title = f"{report['base']}: tokens/s (over plain decoding of this engine), {report['prompts']} prompts"
    return Table(title, ("method", *(f"{_rule(run)}, batch {run['batch']}" for run in report["runs"])), cells)


def fields(report: Report) -> list[Field]:
    """Speed by method, by kind of prompt, and by batch or nodes."""
    first, runs = report["runs"][0], report["runs"]
    rows = sorted(first["rows"], key=lambda row: row["tokens_per_s"]["value"])
    speeds = [row["tokens_per_s"] for row in rows]
    values, reach = [speed["value"] for speed in speeds], [(speed["low"], speed["high"]) for speed in speeds]
    found = [Field({"": Line([_name(row) for row in rows], values, reach=reach)},
                   "", "tokens per second, whole calls\n(95 % intervals)", bars=True)]  # fmt: skip
    kinds = list(first["rows"][0]["kinds"])
    if len(kinds) > 1:
        best = [row for row in reversed(rows) if row["ours"]][:DRAWN]
        lines = {_name(row): Line(kinds, [row["kinds"][kind]["over_plain"] for kind in kinds]) for row in best}
        found.append(Field(lines, "kind of prompt", "speed over plain decoding", bars=True))
    if len({run["batch"] for run in runs}) > 1:
        points: dict[str, list[tuple[int, float]]] = {}
        for run in sorted(runs, key=lambda run: int(run["batch"])):
            if run["temperature"] == first["temperature"]:
                for row in run["rows"]:
                    points.setdefault(_name(row), []).append((run["batch"], row["tokens_per_s"]["value"]))
        found.append(Field(_lines(points), "batch", "tokens per second, all sequences", doubling=True))
    if "best" in report:
        points = {}
        for row in first["rows"]:
            if row["nodes"]:
                points.setdefault(row["drafter"], []).append((row["nodes"], row["over_plain"]["value"]))
        found.append(Field(_lines(points), "nodes of a draft, the root included", "speed over plain decoding"))
    return found


def _lines(points: Mapping[str, list[tuple[int, float]]]) -> dict[str, Line]:
    return {name: Line([x for x, _ in known], [y for _, y in known]) for name, known in points.items()}


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['method']} (LOSSY)" if row["method"].endswith(f":{LOSSY}") else str(row["method"])


def _rule(run: Mapping[str, Any]) -> str:
    return f"temperature {run['temperature']:g}" if run["temperature"] else "greedy"
