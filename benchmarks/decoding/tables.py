"""Reports of ``medusa-bench`` as tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Report = dict[str, Any]
Columns = Sequence[tuple[str, str]]
"""Headings, and how a row of the report fills the cells below them."""

LONG_WORD = 10
"""Characters of a heading that is not broken."""
KIBI = 1024
REPLAYED = "REPLAY of an acceptance trace, not an acceptance of this shape"
STEP: Columns = (
    ("B", "{batch}"), ("N", "{nodes}"), ("verify ms", "{verify_ms:.2f}"), ("over N = 1", "{verify_overhead:.2f}x"),
    ("step ms", "{step_ms:.2f}"), ("over N = 1", "{step_overhead:.2f}x"), ("rows/s", "{rows_per_s:.0f}"),
    ("bound ms", "{roofline_ms:.2f}"), ("of bandwidth", "{roofline_share:.0%}"),
)  # fmt: skip
BASELINE: Columns = (
    ("B", "{batch}"),
    ("transformers generate, tokens/s", "{transformers_tokens_per_s}"),
    ("plain, this engine, tokens/s", "{plain_tokens_per_s}"),
    ("over transformers generate", "{plain_over_transformers:.2f}x"),
)
PROFILE: Columns = (("operator", "{name:.60}"), ("share", "{share:.1%}"))
SCALING: Columns = (
    ("grows", "{size}"), ("to", "{value}"), ("plain ms", "{plain}"), ("model", "{plain_model}"),
    ("tree ms", "{tree}"), ("model", "{tree_model}"), ("over", "{over}"),
    ("draft ms", "{draft}"), ("model", "{draft_model}"),
)  # fmt: skip
REPLAY: Columns = (
    ("B", "{batch}"), ("N", "{nodes}"), ("tokens per step (replay)", "{replay_tokens_per_step:.2f}"),
    ("plain tokens/s", "{plain_tokens_per_s}"), ("replay tokens/s", "{replay_tokens_per_s}"),
    ("step overhead", "{step_overhead:.2f}x"), ("replay speedup", "{replay_speedup:.2f}x"),
    ("clamped", "{clamped_steps} of {all_steps}"),
)  # fmt: skip
OTHERS: Columns = (
    ("engine, plain decoding", "{engine}"), ("tokens/s", "{tokens_per_s}"),
    ("our plain decoding over it", "{plain_over:.2f}x"), ("replay over it", "{replay_over:.2f}x"),
)  # fmt: skip
ATTENTION: Columns = (
    ("backend", "{backend}"), ("B", "{batch}"), ("N", "{nodes}"), ("", "{mode}"), ("ms per layer", "{ms:.4f}"),
    ("bound ms", "{bound_ms:.4f}"), ("of bandwidth", "{share_of_bound:.0%}"),
)  # fmt: skip
TUNE: Columns = (
    ("drafter", "{shown}"), ("K", "{k}"), ("accepted", "{accepted}"), ("per step", "{tokens_per_step}"),
    ("tokens/s", "{tokens_per_s}"), ("speed", "{speedup:.2f}x"), ("equal", "{identical}"),
)  # fmt: skip
TREE: Columns = (
    ("N", "{nodes}"), ("static, predicted", "{predicted:.3f}"), ("static", "{static:.3f}"),
    ("dynamic", "{dynamic:.3f}"), ("dynamic / static", "{dynamic_over_static:.3f}x"),
)  # fmt: skip


def show(report: Report) -> None:
    """Print a report."""
    SHOW[report["kind"]](report)


def title(report: Report) -> str:
    """One line: what was measured, and where."""
    ways = (", LOSSY int8 weights" if report.get("int8") else "") + (", fused pass" if report.get("fused") else "")
    ways += ", steps as graphs" if report.get("graph") else ""
    threads = f", {report['threads']} threads" if report["threads"] else ""
    return (
        f"{report['base']} ({report['weights']} weights), {report['dtype']}{ways}, {report['device_name']}{threads},"
        f" {report['context']} cached tokens"
    )


def _show(name: str, columns: Columns, rows: Iterable[Mapping[str, Any]]) -> None:
    table = Table(title=name, title_justify="left")
    for place, (heading, _) in enumerate(columns):
        width = len(heading) if " " not in heading and len(heading) <= LONG_WORD else None
        table.add_column(heading, justify="right", overflow="fold", no_wrap=place == 0, min_width=width)
    for row in rows:
        table.add_row(*(cell.format_map(row) for _, cell in columns))
    Console().print(table)


def _show_step(report: Report) -> None:
    _show(f"step: {title(report)}; {_bandwidth(report)}", STEP, report["rows"])
    if "baseline" in report:
        _show("the other baseline", BASELINE, report["baseline"])
    if "profile" in report:
        profile = report["profile"]
        shares = ({"name": name, "share": share} for name, share in profile["shares"].items())
        _show(f"a plain step of {profile['profiled_step_ms']:.2f} ms under the profiler", PROFILE, shares)
    if "memory" in report:
        columns = [(name.replace("_", " "), f"{{{name}:,}}") for name in report["memory"][0]]
        _show("memory after many steps", columns, report["memory"])


def _show_scaling(report: Report) -> None:
    rates = f"{report['linear_gflops']} and {report['attention_gflops']} GFLOP/s in linear layers and attention"
    what = f"scaling: {title(report)}; {_bandwidth(report)}, {rates}; trees of {report['tree']} nodes"
    _show(what, SCALING, scaling_lines(report))


def scaling_lines(report: Report) -> list[dict[str, Any]]:
    """A line for each size: the passes of plain decoding and of a tree, and the draft, each with the model's time."""
    cells = {(row["size"], row["value"], row["nodes"]): row for row in report["rows"]}
    plain = next(row for row in report["rows"] if (row["size"], row["value"]) == ("tree", 1))
    lines = []
    for size, value in dict.fromkeys((row["size"], row["value"]) for row in report["rows"]):
        line: dict[str, Any] = {"size": size, "value": shown_size(value)}
        one, draft = cells.get((size, value, 1)), cells.get((size, value, 0))
        tree = cells.get((size, value, value if size == "tree" else report["tree"]))
        one = plain if size == "tree" else one
        for name, row in (("plain", one), ("tree", tree), ("draft", draft)):
            line[name], line[f"{name}_model"] = (f"{row['ms']:.3g}", f"{row['model_ms']:.3g}") if row else ("", "")
        line["over"] = f"{tree['ms'] / one['ms']:.2f}x" if tree and one else ""
        lines.append(line)
    return lines


def shown_size(value: int) -> str:
    """A size in short, as 16k."""
    return str(value) if value < KIBI else f"{value / KIBI:.0f}k"


def _show_replay(report: Report) -> None:
    rows = (row | {"all_steps": row["steps"] * row["batch"]} for row in report["rows"])
    for row in report["rows"]:
        if "others" in row:
            _show(f"other engines with the same weights; {REPLAYED}", OTHERS, row["others"])
    _show(f"{REPLAYED}: {title(report)}", REPLAY, rows)


def _show_attention(report: Report) -> None:
    missing = "".join(f"; without {name}: {reason}" for name, reason in report["missing"].items())
    _show(f"attention: {title(report)}; {_bandwidth(report)}{missing}", ATTENTION, report["rows"])


def _show_tune(report: Report) -> None:
    rule = f"temperature {report['temperature']}" if report["temperature"] else "greedy"
    lossy = ", LOSSY int8 weights" if report["int8"] else ""
    what = f"{report['base']}, {report['dtype']}{lossy}, {report['prompts']} prompts, {rule}, {report['device_name']}"
    auto = f"auto is {report['auto_over_best']:.3f}x of the best fixed way ({report['best']})"
    note = "speed: over plain decoding; per step: tokens; equal: texts that are plain decoding's"
    _show(f"tune: {what}; {auto}; {report['auto']}; {note}", TUNE, report["rows"])
    names = list(next(iter(report["kinds"].values())))
    columns = [("prompts", "{kind}"), *((name, f"{{{name}:.2f}}x") for name in names)]
    rows = ({"kind": kind} | speeds for kind, speeds in report["kinds"].items())
    _show("speed over plain decoding by kind of prompt, each drafter with its fastest size", columns, rows)


def _show_tree(report: Report) -> None:
    what = f"{report['heads']} heads of {report['base']}, {report['dtype']}, {report['prompts']} prompts"
    _show(f"tree: tokens per step at equal N, greedy; {what}", TREE, report["rows"])


SHOW = {
    "step": _show_step, "scaling": _show_scaling, "attention": _show_attention,
    "replay": _show_replay, "tree": _show_tree, "tune": _show_tune,
}  # fmt: skip


def _bandwidth(report: Report) -> str:
    return f"memory: {report['bandwidth_gb_per_s']:.1f} GB/s ({report['bandwidth_method']})"
