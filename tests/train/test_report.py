"""The report of a run directory that is written by hand."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from medusa.train.recipe_file import build_recipe
from medusa.train.report import read_report, write_report
from medusa.train.report.__main__ import main
from medusa.train.report.figures import POINTS

RECIPE = build_recipe({"data.train": "x.jsonl", "base.name": "org/$base$", "optim.loss": "kl"})


def _step(step: int, heads: int = 2) -> dict[str, Any]:
    return {
        "step": step, "epoch": step / 10, "loss": 8.0 / step, "head_loss": [4.0 / step] * heads, "lr": 1e-3,
        "head_top1": [0.1 * head for head in range(heads)], "useful_tokens": 100, "train_seconds": 2.0 * step,
    }  # fmt: skip


EVALUATED = {f"heldout_top{rank}": [0.5, 0.25] for rank in (1, 5, 10)} | {"heldout_tokens_per_step": 1.75}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_run(*records: dict[str, Any]) -> Path:
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(asdict(RECIPE)), encoding="utf-8")
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 9', encoding="utf-8")  # the process died in this line
        return tmp_path

    return write_run


def test_curves_evaluations_and_totals_are_those_of_the_metrics(write: Callable[..., Path]) -> None:
    report = read_report(write(_step(1), _step(2) | EVALUATED, {"step": 2, "train_seconds": 4.0} | EVALUATED))
    assert report["curves"]["step"] == [1, 2]
    assert report["curves"]["loss"] == [8.0, 4.0]
    assert report["curves"]["head_loss"] == [[4.0, 4.0], [2.0, 2.0]]
    assert report["curves"]["useful_tokens_per_s"] == [50.0, 50.0]
    assert [record["step"] for record in report["evaluations"]] == [2, 2]
    assert report["evaluations"][-1]["heldout_tokens_per_step"] == 1.75
    assert report["totals"]["useful_tokens"] == 200
    assert report["totals"]["useful_tokens_per_s"] == 50.0
    assert report["recipe"]["loss"] == "kl"
    assert "LoRA rank" not in report["recipe"]


def test_long_runs_are_averaged_over_stretches(write: Callable[..., Path]) -> None:
    steps = 2 * POINTS + 3
    curves = read_report(write(*(_step(step) for step in range(1, steps + 1))))["curves"]
    assert curves["step"] == [*range(3, steps, 3), steps]
    assert curves["loss"][0] == pytest.approx((8 + 4 + 8 / 3) / 3)
    assert curves["loss"][-1] == pytest.approx((8 / (steps - 1) + 8 / steps) / 2)
    assert curves["useful_tokens_per_s"] == [pytest.approx(50.0)] * len(curves["step"])


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(
    "records", [[_step(1, heads=16)], [_step(1), _step(2) | EVALUATED]], ids=["first", "evaluated"]
)
def test_the_command_writes_a_picture_and_a_table(
    write: Callable[..., Path], records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = write(*records)
    assert main([str(run), "--json", str(tmp_path / "copy.json")]) == 0
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "copy.json").read_text()) == read_report(run)
    table = capsys.readouterr().out
    assert f"{len(records)} steps" in table
    assert ("1.750" in table) == (len(records) == 2)


def test_without_matplotlib_the_log_says_so(
    write: Callable[..., Path], no_pictures: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "medusa.train"):
        path = write_report(write(_step(1)))
    assert path.is_file()
    assert not path.with_suffix(".png").exists()
    assert "matplotlib is not installed" in caplog.text


def test_a_directory_without_metrics_is_one_clear_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main([str(tmp_path)]) == 1
    assert "holds no metrics of a step" in caplog.text
