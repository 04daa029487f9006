"""The output of ``medusa bench accept``: tables, conclusions in words, and fields of a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from medusa.benchmarks.accept.figures import CATEGORY, LENGTH, PLACE, Estimate
from medusa.benchmarks.picture import Field, Line
from medusa.benchmarks.report import Report, Table, machine

SHOWN_DEPTHS = 8
"""Number of depths in tables."""
FEWEST_DRAFTS = 20
"""Least number of drafts that reach a depth, for it to be shown."""
FEWEST = 4
"""Least number of questions of a group that is compared with others."""
REMEDIES = {
    "second to fourth": "more nodes at the first level reach these",
    "fifth to sixteenth": "only wide trees reach these: the drafter is not sure enough of texts like these",
    "lower": "the drafter does not expect these: it has seen, or was trained on, too little like them",
    "outside of the vocabulary": "a larger draft vocabulary, or one chosen from texts like these, reaches them",
}
"""Remedies by the most frequent kind of wrong first guess."""

Row = Mapping[str, Any]


def tables(report: Report) -> list[Table]:
    """Three tables for each drafter: tokens per step, acceptance by depth, and where drafts fail."""
    makers = (_speeds, _depths, _failures)
    return [make(report, name, rows) for name, rows in report["drafters"].items() for make in makers]


def _speeds(report: Report, name: str, rows: Sequence[Row]) -> Table:
    whole, sizes = rows[0], _sizes(rows)
    lines = [(_label(row), row, _shape(row)) for row in rows if row["of"] != PLACE]
    if "tree" in whole["tokens_per_step"]:
        lines.insert(1, ("all, chains", whole, "chain"))
    cells = []
    for label, row, shape in lines:
        found = row["tokens_per_step"]
        values = [*(found[shape][size] for size in sizes), found["chain"][sizes[-1]]]
        cells.append([label, str(row["questions"]), *map(_cell, values)])
    texts, trees = report["texts"], "full trees, " if report["full"] else ""
    title = (
        f"{report['base']}, {name}: tokens per step (95 %), {trees}greedy, {report['max_new_tokens']} tokens at most;"
    )
    title += f" {texts['own']:.1%} of {texts['tokens']:,} tokens are the base's own; {machine(report)}"
    return Table(title, ("questions", "number", *(f"{size} nodes" for size in sizes), f"chain of {sizes[-1]}"), cells)


def _depths(report: Report, name: str, rows: Sequence[Row]) -> Table:
    whole, sizes = rows[0], _sizes(rows)
    lines = [
        (f"all, {shape} of {size}", by_size[size])
        for shape, by_size in whole["acceptance"].items() for size in (sizes if shape == "tree" else sizes[-1:])
    ]  # fmt: skip
    lines += [(_label(row), row["acceptance"][_shape(row)][sizes[-1]]) for row in rows[1:] if row["of"] != PLACE]
    cells = [[label, *(_cell(found) for found in _known(values))] for label, values in lines]
    depths = range(max(map(len, cells)) - 1)
    cells = [line + [""] * (1 + len(depths) - len(line)) for line in cells]
    title = f"{report['base']}, {name}: share of drafts that are right at a depth where they were right above (95 %);"
    title += f" groups: {_shape(whole)}s of {sizes[-1]}"
    few = f"Fewer than {FEWEST_DRAFTS} drafts: answer more questions, or with more tokens." if not depths else ""
    return Table(title, ("questions", *(f"depth {depth + 1}" for depth in depths)), cells, few)


def _failures(report: Report, name: str, rows: Sequence[Row]) -> Table:
    cells = [
        [_label(row), f"{row['places']:,}", _cell(row["first_right"])]
        + [f"{share:.3f}" for share in row["first_wrong"].values()]
        for row in rows
    ]
    title = f"{report['base']}, {name}: where drafts fail. First guesses at all places of the answers; of wrong ones,"
    title += " the rank of the text's token (shares of all places)"
    return Table(title, ("places", "number", "right (95 %)", *rows[0]["first_wrong"]), cells, conclusion(rows))


def conclusion(rows: Sequence[Row]) -> str:
    """Conclusions from the figures of a drafter, in two or three sentences."""
    whole = rows[0]
    right, wrong = whole["first_right"]["value"], whole["first_wrong"]
    parts = ", ".join(f"{share / (1 - right):.0%} {name}" for name, share in wrong.items() if share)
    most = max(wrong, key=lambda name: float(wrong[name]))
    said = f"First guesses are right at {right:.0%} of the places. "
    if parts:
        said += f"Where they are wrong, the text's token is: {parts}. Most often it is {most}: {REMEDIES[most]}. "
    return said + f"{_widest(rows)} {_by_depth(whole)}".strip()


def _widest(rows: Sequence[Row]) -> str:
    """The groups that differ most, if their intervals do not overlap."""
    found = []
    for of in (CATEGORY, LENGTH, PLACE):
        own = [row for row in rows if row["of"] == of and row["questions"] >= FEWEST]
        if len(own) > 1:
            best = max(own, key=lambda row: row["first_right"]["low"])
            worst = min(own, key=lambda row: row["first_right"]["high"])
            if best["first_right"]["low"] > worst["first_right"]["high"]:
                found.append((best["first_right"]["value"] - worst["first_right"]["value"], of, best, worst))
    if not found:
        return "No category, length of prompt or place in the answer differs from the others beyond the intervals."
    _, of, best, worst = max(found, key=lambda one: one[0])
    outside, said = "outside of the vocabulary", []
    for row in (best, worst):
        share = f"; {row['first_wrong'][outside]:.0%} {outside}" if rows[0]["first_wrong"][outside] else ""
        said.append(f"{row['first_right']['value']:.2f} ({row['group']}{share})")
    return f"They differ most by {of}: {said[0]} against {said[1]}."


def _by_depth(whole: Row) -> str:
    """Whether acceptance decreases with depth, in chains."""
    known = _known(list(whole["acceptance"]["chain"].values())[-1])
    if len(known) < 2:
        return ""
    shares = " ".join(f"{found['value']:.2f}" for found in known)
    worse = any(found["high"] < known[0]["low"] for found in known)
    verdict = (
        "deeper guesses are worse" if worse else "deeper guesses are no worse, so the first one is what to improve"
    )
    return f"Chains are right by depth, given right tokens above, at {shares}: {verdict}."


def fields(report: Report) -> list[Field]:
    """Tokens per step against nodes, acceptance by depth, tokens per step by group, and first guesses by group."""
    speeds, depths, groups = dict[str, Line](), dict[str, Line](), dict[str, Line]()
    for name, rows in report["drafters"].items():
        whole, sizes = rows[0], _sizes(rows)
        for shape, by_size in whole["tokens_per_step"].items():
            style = "o-" if shape == "tree" else "o--"
            values = [by_size[size] for size in sizes]
            speeds[f"{name}, {shape}s"] = _line(sizes, values, style)
            known = _known(whole["acceptance"][shape][sizes[-1]])
            depths[f"{name}, {shape} of {sizes[-1]}"] = _line(range(1, len(known) + 1), known, style)
        middle, own = sizes[len(sizes) // 2], [row for row in rows if row["of"] != PLACE]
        values = [row["tokens_per_step"][_shape(row)][middle] for row in own]
        groups[f"{name}, {middle} nodes"] = _line([_label(row) for row in own], values)
    first, rows = next(iter(report["drafters"].items()))
    names = [_label(row) for row in rows]
    fates = {"right": Line(names, [row["first_right"]["value"] for row in rows])}
    fates |= {fate: Line(names, [row["first_wrong"][fate] for row in rows]) for fate in rows[0]["first_wrong"]}
    return [
        Field(speeds, "nodes of a draft, the root included", "tokens per step (95 %)", doubling=True),
        Field(depths, "depth", "right, where right above (95 %)"),
        Field(groups, "", "tokens per step (95 %)", bars=True),
        Field(fates, "", f"first guesses of {first}:\nwhere the text's token stands", bars=True, stacked=True),
    ]


def _known(values: Sequence[Estimate | None]) -> list[Estimate]:
    """The estimates of the first depths that enough drafts reach, up to the first without a right one."""
    known = list[Estimate]()
    for found in values[:SHOWN_DEPTHS]:
        if found is None or found["of"] < FEWEST_DRAFTS or (known and not known[-1]["value"]):
            break
        known.append(found)
    return known


def _line(x: Sequence[Any], values: Sequence[Estimate], style: str = "o-") -> Line:
    return Line(x, [v["value"] for v in values], style, [(v["low"], v["high"]) for v in values])


def _sizes(rows: Sequence[Row]) -> list[int]:
    return list(rows[0]["tokens_per_step"]["chain"])


def _shape(row: Row) -> str:
    """The shape of drafts: trees if the base verifies them."""
    return str(next(iter(row["tokens_per_step"])))


def _label(row: Row) -> str:
    return {LENGTH: "prompt of ", PLACE: "place "}.get(row["of"], "") + str(row["group"])


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    return f"{value:.2f}" if low == high else f"{value:.2f} ({low:.2f} to {high:.2f})"
