"""Variants of a recipe, trained and compared."""

import json
import sys

import pytest

from medusa.benchmarks.study import main
from tests.train.jobs import write_recipe

VARIANTS = """
one: {heads.architecture: medusa}
two: {heads.architecture: recurrent, optim.loss: kl}
three: {optim.lr: 1e-3}
"""


@pytest.fixture
def words(tmp_path, base_directory, samples, heldout, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # drawing a run's curves takes longer than training here
    evaluate = {"prompts": 2, "max_new_tokens": 6}
    sections = {"data": {"heldout": str(heldout)}, "optim": {"steps": 3}, "evaluate": evaluate}
    sections["heads"] = {"architecture": "attention", "feature_layers": 1}
    recipe = write_recipe(tmp_path / "recipe.yaml", base_directory, samples, sections)
    (tmp_path / "variants.yaml").write_text(VARIANTS)
    return ["--recipe", str(recipe), "--variants", str(tmp_path / "variants.yaml"), "--out", str(tmp_path / "out")]


@pytest.mark.slow
def test_variants_are_trained_once_and_compared(words, tmp_path, capsys):
    assert main(words) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["variant"] for row in report["rows"]] == list(report["variants"]) == ["one", "two", "three"]
    assert all(len(row["top1"].split(", ")) == 3 for row in report["rows"])
    assert "| two |" in (tmp_path / "out" / "report.md").read_text()
    assert len(list((tmp_path / "out").glob("hidden-*"))) == 2, "runs that read the same positions share hidden states"
    weights = tmp_path / "out" / "two" / "seed-0" / "heads" / "heads.safetensors"
    trained = weights.stat().st_mtime_ns
    assert main([*words, "--only", "two", "--seeds", "2"]) == 0
    assert weights.stat().st_mtime_ns == trained
    (row,) = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    steps = [figures["heldout_tokens_per_step"] for figures in row["figures"]]
    assert len(steps) == 2 and row["tokens_per_step"] == sum(steps) / 2 >= 1


def test_the_designs_of_the_repository_are_recipes(samples, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("medusa.benchmarks.study.train", lambda words: asked.append(words) or 7)
    assert main(["--out", str(tmp_path), "--recipe.data.train", str(samples)]) == 7, "a run that fails ends the study"
    assert asked[0][-1] == str(tmp_path / "medusa-ce" / "seed-0")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--only nothing", "variant (nothing) is not in"),
        ("--recipe.optim.speed 3", "variant (one): unknown key optim.speed"),
        ("--sedes 2", "argument (--sedes) is unknown"),
        ("--recipe nowhere.yaml", "nowhere.yaml"),
        ("--variants nowhere.yaml", "cannot be read"),
        ("--recipe.evaluate.prompts 0", "are what variants are compared on"),
    ],
)
def test_wrong_use_is_one_message(words, tmp_path, wrong, message, capsys):
    assert main([*words, *wrong.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_variants_of_one_name_are_refused(words, tmp_path, capsys):
    again = tmp_path / "again.yaml"
    again.write_text("one: {optim.lr: 1.0e-3}\none: {optim.lr: 1.0e-4}\n")
    assert main([*words, "--variants", str(again)]) == 2
    assert "again.yaml) cannot be read: one is there twice" in capsys.readouterr().err
