"""The report of evaluations that are written by hand."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study.report import summarise, tables


def _evaluation(steps: dict[str, list[int]]) -> dict[str, Any]:
    found = {"tokens": [60, 40], "steps": steps, "tries": [[10, 5], [10, 0]], "hits": [[5, 2], [0, 0]]}
    return {"parameters": 1234, "tree": None, "temperatures": {"0.0": found, "1.0": found}}


EVALUATIONS = {
    "medusa": [_evaluation({"dynamic 4": [40, 40], "dynamic 8": [30, 20], "static 8": [40, 40]})],
    "better": [_evaluation({"dynamic 4": [20, 20], "dynamic 8": [24, 20]})],
}
SPEED = {
    "medusa": {tree: {"draft_ms": 0.5, "speedups": [1.5, 1.2, 1.9]} for tree in ("dynamic 4", "dynamic 8", "static 8")},
    "better": {tree: {"draft_ms": 0.5, "speedups": [1.5, 1.2, 1.9]} for tree in ("dynamic 4", "dynamic 8")},
}


def _report(speed: dict[str, Any]) -> dict[str, Any]:
    settings = {"temperatures": (0.0, 1.0)}
    return {"figures": summarise(EVALUATIONS), "speed": speed, "settings": settings, "device": "a CPU"}


def test_the_best_dynamic_tree_is_compared_with_the_baselines_static_one() -> None:
    figures = summarise(EVALUATIONS)
    better = figures["better"]["1.0"]
    assert better["tokens_per_step"]["dynamic 4"]["value"] == 2.5
    assert better["best"] == "dynamic 4"
    assert better["over_baseline"]["value"] == pytest.approx(2.5 / 1.25)
    assert figures["medusa"]["0.0"]["over_baseline"]["value"] == pytest.approx(2.0 / 1.25)
    assert [estimate["value"] for estimate in better["acceptance"]] == [0.25, pytest.approx(0.4)]
    assert figures["better"]["parameters"] == 1234


def test_the_baseline_is_compared_with_itself_seed_by_seed() -> None:
    runs = [_evaluation({"dynamic 8": [s, s], "static 8": [2 * s, 2 * s]}) for s in (20, 40, 60)]
    ratio = summarise({"medusa": runs})["medusa"]["0.0"]["over_baseline"]
    assert (ratio["low"], ratio["high"]) == pytest.approx((2.0, 2.0))


def test_tables_hold_the_figures() -> None:
    text = tables(_report(SPEED))
    lines = text.splitlines()
    assert "| heads | dynamic 4 | dynamic 8 | static 8 | best / baseline, static |" in lines
    (row, *_) = [line for line in lines if line.startswith("| better | 2.50 ± ")]
    assert "| 2.00 [" in row
    assert row.endswith("] |")
    assert "| better | 1,234 | 0.50 | 0.50 | 1.50x | 1.50x |  |" in lines
    assert "Cost" not in tables(_report({}))


def test_tables_are_as_wide_as_the_design_with_the_most_heads() -> None:
    report = _report({})
    for values in report["figures"]["better"].values():
        if isinstance(values, dict):
            values["acceptance"] = values["acceptance"] * 2
    rows = tables(report).split("**Acceptance by depth, temperature 0**\n\n")[1].splitlines()[:4]
    assert rows[0] == "| heads | 1 | 2 | 3 | 4 |"
    assert {row.count("|") for row in rows} == {6}


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize("speed", [{}, SPEED], ids=["no speed", "speed"])
def test_pictures_are_drawn(speed: dict[str, Any], tmp_path: Path) -> None:
    from benchmarks.study.picture import draw

    written = draw(_report(speed), tmp_path)
    assert [path.name for path in written] == ["acceptance.png", "tokens_per_step.png", "speedup.png"][
        : 2 + bool(speed)
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
