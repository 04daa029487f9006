"""The benchmark: every method on the same prompts, what is told of them, and what the command writes."""

import argparse
import json
import shutil
import sys

import pytest
import torch

from medusa import BaseModel, MedusaModel
from medusa.benchmarks.__main__ import main
from medusa.benchmarks.peers.engine import MODES, SCRIPTS, Place
from medusa.benchmarks.run.command import _peers
from medusa.benchmarks.run.measure import Rate, figures, measure
from medusa.benchmarks.run.methods import Answers, Method, of_transformers, ours, unpacked_copy
from medusa.benchmarks.step.shapes import random_heads

PROMPTS = [[5, 9, 7], [30, 2], [8, 8, 8, 3]]


def test_our_methods_say_what_plain_decoding_says(model):
    names = ("plain", "heads", "hybrid", "prompt-lookup", "auto")
    for temperature in (0.0, 0.8):
        answers = [ours(model, name, 12, temperature).complete(PROMPTS, [0, 1, 2]) for name in names]
        assert all(answer.tokens == answers[0].tokens for answer in answers)
        assert answers[0].passes == [len(tokens) for tokens in answers[0].tokens]


def test_a_batch_of_transformers_is_ours(model):
    plain = ours(model, "plain", 12, 0.0)
    for method in of_transformers(unpacked_copy(model.base), model.base.eos_ids, 12, 0.0):
        groups = [PROMPTS] if method.batches else [[prompt] for prompt in PROMPTS]
        said = [tokens for group in groups for tokens in method.complete(group, [0] * len(group)).tokens]
        assert said == plain.complete(PROMPTS, [0, 0, 0]).tokens, method.name


def test_settings_of_a_checkpoint_reach_neither_side(base_directory, tmp_path):
    directory = shutil.copytree(base_directory, tmp_path / "base")
    settings = {"repetition_penalty": 1.5, "top_p": 0.1, "do_sample": True, "eos_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    model = MedusaModel.from_pretrained(None, base=directory, dtype=torch.float64)
    (method, *_) = of_transformers(unpacked_copy(model.base), model.base.eos_ids, 12, 0.0)
    assert method.complete(PROMPTS, [0]).tokens == ours(model, "plain", 12, 0.0).complete(PROMPTS, [0, 0, 0]).tokens


@pytest.mark.parametrize(
    ("name", "message"),
    [("heads:fast", "names no rule"), ("guessing", "is not known"), ("heads+ngram", "would remember")],
)
def test_methods_that_there_are_not_are_refused(model, name, message):
    with pytest.raises(ValueError, match=message):
        ours(model, name, 4, 0.8)


def test_rows_tell_speeds_and_what_is_equal(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("medusa.benchmarks.run.measure.time.perf_counter", lambda: float(next(clock)))

    def method(name, tokens, passes):
        return Method(name, lambda prompts, _: Answers([tokens] * len(prompts), [passes] * len(prompts)), ours=True)

    methods = [method("plain", [1, 2, 3, 4], 4), method("twice", [1, 2, 9, 4, 5, 6, 7, 8], 2)]
    timings = measure(methods, PROMPTS, 1, rounds=2)
    plain, twice = figures(methods, timings, {"a": [0, 1], "b": [2]}, 1)
    assert plain["tokens_per_s"] == pytest.approx({"value": 4, "low": 4, "high": 4})
    assert twice["over_plain"] == pytest.approx({"value": 2, "low": 2, "high": 2})
    assert (twice["tokens_per_pass"], twice["identical"]) == (4, 0)
    assert twice["kinds"]["b"] == pytest.approx({"over_plain": 2, "tokens_per_pass": 4})
    assert twice["rounds"] == pytest.approx([8, 8])


def test_intervals_are_those_of_the_normal_distribution_and_of_pairs():
    values = torch.randn(1, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    found = Rate(values, torch.ones_like(values)).estimate()
    half = 1.96 * float(values.std()) / 20
    assert found["value"] == pytest.approx(float(values.mean()))
    assert found["low"] == pytest.approx(found["value"] - half, abs=0.15 * half)
    assert found["high"] == pytest.approx(found["value"] + half, abs=0.15 * half)
    easy, below = torch.linspace(1, 9, 30, dtype=torch.float64)[None], torch.ones(1, 30, dtype=torch.float64)
    ratio = Rate(2 * easy, below).estimate(Rate(easy, below))  # prompts that are hard for both say nothing about it
    assert (ratio["low"], ratio["value"], ratio["high"]) == pytest.approx((2.0, 2.0, 2.0))
    assert Rate(easy, below).estimate()["high"] > 5.5


def test_the_command_writes_tables_and_a_picture(model, base_directory, tmp_path, capsys):
    model.save_pretrained(tmp_path / "heads")
    (tmp_path / "x.jsonl").write_text(
        '{"category": "qa", "turns": ["why"]}\n{"category": "coding", "turns": ["code"]}\n{"prompt": "go on"}\n'
    )
    words = ["--heads", str(tmp_path / "heads"), "--base", str(base_directory), "--dtype", "float32", "--rounds", "1"]
    files = [f"--{name}={tmp_path / 'new' / file}" for name, file in (
        ("json", "run.json"), ("markdown", "run.md"), ("picture", "run.png"),
    )]  # fmt: skip
    asked = ["--questions", str(tmp_path / "x.jsonl"), "--temperature", "0", "0.7", "--batch", "1,2"]
    assert main(["run", *words, *files, *asked, "--max-new-tokens", "6", "--draft-model", str(base_directory)]) == 0
    report = json.loads((tmp_path / "new" / "run.json").read_text())
    assert [(run["temperature"], run["batch"]) for run in report["runs"]] == [(0, 1), (0, 2), (0.7, 1), (0.7, 2)]
    for run in report["runs"]:
        rows = {row["method"]: row for row in run["rows"]}
        assert {"plain", "heads", "hybrid", "draft-model", "auto", "transformers"} <= set(rows)
        assert ("auto:typical" in rows) == (run["temperature"] > 0)
        assert ("transformers assisted" in rows) == (run["batch"] == 1)
        lossless = [row for name, row in rows.items() if row["ours"] and name != "auto:typical"]
        assert all(row["identical"] == row["prompts"] == 3 for row in lossless)
    assert set(report["runs"][0]["rows"][0]["kinds"]) == {"qa", "mt_bench", "prompts"}
    assert "| auto:typical (LOSSY) |" in (tmp_path / "new" / "run.md").read_text()
    assert (tmp_path / "new" / "run.png").stat().st_size > 10_000
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 prompts, temperature 0.7, batch 2" in shown
    assert shown.rindex("tokens/s (over plain decoding of this engine), 3 prompts") > shown.rindex("per pass")


FAKE = f"""
import json, sys
sys.path.insert(0, {str(SCRIPTS)!r})
from loop import serve

def load(model, mode, room, heads=None):
    drafts = json.load(open(heads + "/config.json"))["num_heads"] if heads else 1
    return lambda prompts, new, eos: [[drafts] * new + eos + [9] for _ in prompts]

serve(load, "pytest")
"""


@pytest.mark.parametrize(("architecture", "names"), [("medusa", ["plain", "medusa"]), ("recurrent", ["plain"])])
def test_peers_draft_with_heads_that_they_take(base_directory, tmp_path, monkeypatch, architecture, names):
    (tmp_path / "fake.py").write_text(FAKE)
    place = Place(sys.executable, str(tmp_path / "fake.py"), "some/model")
    monkeypatch.setattr("medusa.benchmarks.peers.engine.places", lambda *_: {"vllm": place})
    monkeypatch.setitem(MODES, "vllm", ("plain", "medusa"))
    base = BaseModel.load(base_directory, dtype=torch.bfloat16, device="cpu")
    model, versions = MedusaModel(base, random_heads(base, architecture, 2)), {}
    options = argparse.Namespace(peers=str(tmp_path), max_new_tokens=3, shape=None)
    with _peers(options, model, 99, versions) as methods:
        assert [method.name for method in methods] == [f"vllm {name}" for name in names]
        told = [method.complete([[5], [6]], [0, 0]).tokens for method in methods]
        assert told == [[[drafts] * 3 + [0]] * 2 for drafts in (1, 2)][: len(names)]  # 0 ends a text
    assert versions == {"vllm": pytest.__version__}


def test_questions_that_are_none_are_one_message(base_directory, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"text": "why"}\n')
    assert main(["run", "--base", str(base_directory), "--questions", str(tmp_path / "x.jsonl")]) == 1
    assert "is not a question" in capsys.readouterr().err


def test_peers_with_other_numbers_are_refused(model, base_directory, tmp_path, capsys):
    model.save_pretrained(tmp_path / "heads")
    words = ["--heads", str(tmp_path / "heads"), "--base", str(base_directory), "--dtype", "float32"]
    assert main(["run", *words, "--count", "1", "--peers", str(tmp_path)]) == 1
    assert "--peers compute in bfloat16 on a CPU, and this base is in torch.float32 on cpu" in capsys.readouterr().err
