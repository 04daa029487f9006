"""Runs that end when held-out acceptance no longer grows, and write the best heads (`evaluate.patience`)."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa import DraftHeads, HeadsConfig, build_heads
from medusa.formats import load_heads
from medusa.train.best import Best, chain_length
from medusa.train.config import Recipe
from medusa.train.recipe_file import build_recipe
from medusa.train.report.figures import read_report
from medusa.train.run_directory import RunDirectory
from medusa.train.trainer import Trainer
from tests.train.jobs import Acting, assert_same_run, metrics, run

pytestmark = pytest.mark.usefixtures("no_pictures")

PATIENT = {"optim.steps": 9, "evaluate.every_steps": 1, "evaluate.patience": 3, "log.checkpoint_steps": 2}
ACCURACY = {1: 0.1, 2: 0.6, 3: 0.3, 4: 0.6, 5: 0.2, 6: 0.9}
"""Of the first head after each step. The best evaluation is that of step 2, and the run ends at step 5."""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations say what `ACCURACY` has for the step whose weights they are given."""
    known: dict[float, float] = {}

    def evaluate(self: Trainer, heads: DraftHeads) -> dict[str, Any]:
        weights = sum(float(weight.detach().double().abs().sum()) for weight in heads.parameters())
        return {"heldout_top1": [known.setdefault(weights, ACCURACY.get(self.step, 0.0)), 0.5, 0.5]}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)


def test_a_chain_is_as_long_as_its_heads_are_right() -> None:
    assert chain_length([0.5, 0.4, 0.1]) == pytest.approx(1 + 0.5 + 0.2 + 0.02)


@pytest.mark.usefixtures("scripted")
def test_a_run_ends_when_accuracy_no_longer_grows_and_writes_the_best_heads(recipe: Path, tmp_path: Path) -> None:
    assert run(recipe, tmp_path / "run", **PATIENT) == 0
    last = metrics(tmp_path / "run")[-1]
    assert (last["step"], last["steps"], last["heldout_top1"][0]) == (5, 5, 0.6)
    assert last["heads_step"] == 2 == read_report(tmp_path / "run")["evaluations"][-1]["step"]
    best, written = load_heads(tmp_path / "run/best"), load_heads(tmp_path / "run/heads")
    assert all(torch.equal(one, other) for one, other in zip(best.parameters(), written.parameters(), strict=True))
    assert run(recipe, tmp_path / "all", **PATIENT | {"evaluate.patience": 0}) == 0
    assert metrics(tmp_path / "all")[-1]["step"] == 9
    assert not (tmp_path / "all/best").exists()
    before = (tmp_path / "run/metrics.jsonl").read_text()
    assert run(recipe, tmp_path / "run", **PATIENT) == 0, "it is finished"
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


@pytest.mark.usefixtures("scripted")
def test_a_resumed_run_knows_the_best_heads(recipe: Path, tmp_path: Path, interrupted_at: Acting) -> None:
    assert run(recipe, tmp_path / "whole", **PATIENT) == 0
    with interrupted_at(4):
        assert run(recipe, tmp_path / "run", **PATIENT) == 130
    assert run(recipe, tmp_path / "run", **PATIENT) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 5
    with interrupted_at(4):
        assert run(recipe, tmp_path / "late", **PATIENT | {"evaluate.patience": 0}) == 130
    assert run(recipe, tmp_path / "late", **PATIENT) == 0, "earlier evaluations kept no heads"
    assert_same_run(tmp_path / "run", tmp_path / "whole", tolerance=0.0)


@pytest.mark.usefixtures("scripted")
def test_best_heads_of_other_evaluations_are_not_mixed_in(recipe: Path, tmp_path: Path, interrupted_at: Acting) -> None:
    without = PATIENT | {"evaluate.patience": 0}
    assert run(recipe, tmp_path / "last", **without) == 0
    for values in (without, PATIENT | {"evaluate.rows": 7}):
        directory = tmp_path / str(values["evaluate.patience"])
        with interrupted_at(4):
            assert run(recipe, directory, **PATIENT) == 130
        with interrupted_at(8):
            assert run(recipe, directory, **values) == 130
        assert run(recipe, directory, **PATIENT | {"evaluate.rows": values.get("evaluate.rows", 64)}) == 0
        assert metrics(directory)[-1]["step"] == 9
    written, expected = load_heads(tmp_path / "0/heads"), load_heads(tmp_path / "last/heads")
    pairs = zip(written.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "best/ holds those of step 2, and step 6 was better"


@pytest.mark.usefixtures("scripted")
def test_an_evaluation_that_ends_the_run_ends_it_where_a_signal_left_it_out(
    recipe: Path, tmp_path: Path, before_step: Acting
) -> None:
    with before_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert run(recipe, tmp_path, **PATIENT) == 143
    assert metrics(tmp_path)[-1]["step"] == 5
    assert run(recipe, tmp_path, **PATIENT) == 0
    assert [(line["step"], line["heldout_top1"][0]) for line in metrics(tmp_path)[4:]] == [(5, 0.2), (5, 0.6)]
    position = RunDirectory(tmp_path).position()
    assert position is not None and position.step == position.total == 5, "it is finished"


def test_evaluations_from_before_a_change_stay_out_of_the_next_resume(tmp_path: Path) -> None:
    directory, heads = RunDirectory(tmp_path), build_heads(HeadsConfig(hidden_size=8, vocab_size=9))
    alone: Any = SimpleNamespace(rank=0, from_first=lambda call: call())
    values = {"data.train": "a.jsonl", "evaluate.patience": 3, "evaluate.every_steps": 2}
    recipe, other = build_recipe(values), build_recipe(values | {"evaluate.rows": 7})

    def resumed(values: Recipe, step: int, accuracy: float) -> Best:
        best, figures = Best(values, directory, step - 2, alone), {"heldout_top1": [accuracy]}
        best.observe(step, figures, heads)
        directory.log({"step": step, **figures})
        return best

    resumed(recipe, 2, 0.9)
    resumed(other, 4, 0.5)
    assert resumed(other, 6, 0.4)._seen == [(1.5, 4), (1.4, 6)]


@pytest.mark.usefixtures("scripted")
def test_an_evaluation_that_a_signal_left_out_is_no_failure(recipe: Path, tmp_path: Path, before_step: Acting) -> None:
    values = PATIENT | {"optim.steps": 3, "evaluate.patience": 1}
    with before_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert run(recipe, tmp_path, **values) == 143
    assert run(recipe, tmp_path, **values) == 0
    found = [record.get("heldout_top1", [None])[0] for record in metrics(tmp_path)]
    assert found == [0.1, 0.6, None, 0.6], "after each step but the last, and at the end"


@pytest.mark.usefixtures("scripted")
def test_the_last_heads_are_written_where_they_are_the_best(recipe: Path, tmp_path: Path) -> None:
    values = {"optim.steps": 6, "optim.final_lr_ratio": 0.5, "evaluate.patience": 4}
    assert run(recipe, tmp_path / "run", **PATIENT | values) == 0
    assert metrics(tmp_path / "run")[-1]["heldout_top1"][0] == 0.9
    best, written = load_heads(tmp_path / "run/best"), load_heads(tmp_path / "run/heads")
    assert any(not torch.equal(one, other) for one, other in zip(best.parameters(), written.parameters(), strict=True))
