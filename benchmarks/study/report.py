"""The figures of a study: evaluations of all runs in; estimates of every variant out, and their tables in Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from benchmarks.study.statistics import Estimate, Rate

Evaluation = Mapping[str, Any]
"""What `benchmarks.study.evaluate` wrote for one run."""


def summarise(evaluations: Mapping[str, Sequence[Evaluation]]) -> dict[str, Any]:
    """Estimates of every variant over its seeds.

    Args:
        evaluations: By variant, one per seed. The first variant is the baseline, the one with a static tree.

    Returns:
        By variant "parameters" and, by temperature, "acceptance" (one estimate per depth), "tokens_per_step" (by tree),
        "best" (the dynamic tree with the most of them) and "over_baseline" (that one / the baseline's static tree).
    """
    baseline = next(iter(evaluations.values()))
    figures: dict[str, Any] = {}
    for name, runs in evaluations.items():
        figures[name] = {"parameters": runs[0]["parameters"]}
        for temperature in runs[0]["temperatures"]:
            ours, theirs = ([run["temperatures"][temperature] for run in group] for group in (runs, baseline))
            figures[name][temperature] = _figures(ours, theirs, same_heads=runs is baseline)
    return figures


def _figures(runs: Sequence[Evaluation], baseline: Sequence[Evaluation], same_heads: bool) -> dict[str, Any]:
    rates = {tree: _tokens_per_step(runs, tree) for tree in runs[0]["steps"]}
    dynamic = [tree for tree in rates if tree.startswith("dynamic")]
    best = max(dynamic, key=lambda tree: float(rates[tree].value()))
    static = next(tree for tree in baseline[0]["steps"] if tree.startswith("static"))
    return {
        "acceptance": [asdict(estimate) for estimate in _acceptance(runs)],
        "tokens_per_step": {tree: asdict(rate.estimate()) for tree, rate in rates.items()},
        "best": best,
        "over_baseline": asdict(rates[best].over(_tokens_per_step(baseline, static), same_heads)),
    }


def _tokens_per_step(runs: Sequence[Evaluation], tree: str) -> Rate:
    tokens, steps = [run["tokens"] for run in runs], [run["steps"][tree] for run in runs]
    return Rate(torch.tensor(tokens), torch.tensor(steps))


def _acceptance(runs: Sequence[Evaluation]) -> Iterator[Estimate]:
    """At each depth, how often the head there goes on rightly where all heads before it did."""
    hits_SPK, tries_SPK = (torch.tensor([run[name] for run in runs]) for name in ("hits", "tries"))
    for hits_SP, tries_SP in zip(hits_SPK.unbind(2), tries_SPK.unbind(2), strict=True):
        yield Rate(hits_SP, tries_SP).estimate()


def tables(report: Mapping[str, Any]) -> str:
    """The report's tables in Markdown; ± is half of the width of a 95 % interval."""
    figures, speed = report["figures"], report["speed"]
    first = next(iter(figures.values()))
    temperatures = report["settings"]["temperatures"]
    parts = []
    for temperature in map(str, temperatures):
        trees = list(first[temperature]["tokens_per_step"])  # the baseline has the static one too
        parts.append(f"**Tokens per step, temperature {float(temperature):g}**\n")
        rows = ([name, *_cells(values[temperature]["tokens_per_step"], trees), _ratio(values[temperature])]
                for name, values in figures.items())  # fmt: skip
        parts.append(_table(["heads", *trees, "best / baseline, static"], rows))
        depth = max(len(values[temperature]["acceptance"]) for values in figures.values())
        parts.append(f"**Acceptance by depth, temperature {float(temperature):g}**\n")
        rows = ([name, *map(_plus_minus, values[temperature]["acceptance"])] for name, values in figures.items())
        parts.append(_table(["heads", *map(str, range(1, depth + 1))], rows))
    if speed:
        parts.append("**Cost and speed**\n")
        parts.append(_speed_table(figures, speed))
    return "\n".join(parts)


def _speed_table(figures: Mapping[str, Any], speed: Mapping[str, Any]) -> str:
    """Draft time at the smallest and the largest tree, and the speedup with each tree."""
    trees = list(speed[next(iter(figures))])
    dynamic = [tree for tree in trees if tree.startswith("dynamic")]
    ends = list(dict.fromkeys((dynamic[0], dynamic[-1])))
    rows = (
        [
            name,
            f"{figures[name]['parameters']:,}",
            *(f"{speed[name][tree]['draft_ms']:.2f}" for tree in ends),
            *(f"{median(speed[name][tree]['speedups']):.2f}x" if tree in speed[name] else "" for tree in trees),
        ]
        for name in figures
    )
    return _table(["heads", "parameters", *(f"draft ms, {tree}" for tree in ends), *trees], rows)


def _cells(estimates: Mapping[str, Mapping[str, float]], names: Iterable[str]) -> list[str]:
    return [_plus_minus(estimates[name]) if name in estimates else "" for name in names]


def _plus_minus(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.2f} ± {(estimate['high'] - estimate['low']) / 2:.2f}"


def _ratio(values: Mapping[str, Any]) -> str:
    ratio = values["over_baseline"]
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join([*line, *[''] * (len(headings) - len(line))])} |\n" for line in lines)
