import json
import os
import shutil
import signal
import sys
import threading
import time

import pytest

from medusa import BaseModel, MedusaModel
from medusa.benchmarks.demo import LABELS
from medusa.benchmarks.demo import __main__ as demo
from medusa.benchmarks.demo.figures import measured
from medusa.benchmarks.demo.report import publish
from medusa.benchmarks.progress import Progress
from medusa.benchmarks.questions import file_questions
from medusa.benchmarks.run.measure import measure, repeated_share
from medusa.benchmarks.run.methods import Answers, Method
from tests.conftest import CLONES_CACHE

SAVING = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(0.6)
    Path(sys.argv[1]).touch()
    sys.exit(130)

signal.signal(signal.SIGINT, save)
Path(sys.argv[1] + ".ready").touch()
time.sleep(60)
"""
PROMPTS = [[5, 6, 7], [40, 41], [9]]


def test_ctrl_c_waits_for_what_a_stage_saves(tmp_path):
    """``subprocess.run`` would kill it after a quarter of a second."""
    place = tmp_path / "saved"

    def interrupt():
        while not place.with_name("saved.ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        demo._run(sys.executable, "-c", SAVING, str(place))
    thread.join()
    assert place.exists()


def test_methods_take_turns_and_every_stage_says_what_it_does(capsys):
    """In a log: a line as each stage begins, the warm-ups, which may compile for minutes, among them."""
    order = []

    def method(name):
        def complete(prompts, seeds):
            order.append(name)
            return Answers([[1]] * len(prompts))

        return Method(name, complete)

    measure([method("a"), method("b")], PROMPTS, 1, rounds=2)
    assert "".join(order) == "ab" + "aaabbb" + "bbbaaa", "one warm-up each, then alternated"
    lines = [line.split("  ") for line in capsys.readouterr().err.splitlines()]
    assert [(done, stage.removeprefix("batch 1, ")) for _, done, stage in lines] == [
        ("0/14", "warm-up: a"), ("1/14", "warm-up: b"), ("2/14", "round 1 of 2: a"), ("5/14", "round 1 of 2: b"),
        ("8/14", "round 2 of 2: b"), ("11/14", "round 2 of 2: a"),
    ]  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_call_shows_signs_of_life(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Progress(total=1, bar_seconds=0.01, line_seconds=0.01) as progress:
        progress.stage("warm-up: slow")
        time.sleep(0.3)
    shown = capsys.readouterr().err
    assert shown.count("warm-up: slow") > 3
    assert ("\r" in shown) == terminal


def test_what_the_demo_compares_decodes_greedily(make_heads, base_directory):
    """On untrained heads of a tiny base: all say the same."""
    model = MedusaModel(BaseModel.load(base_directory, device="cpu"), make_heads(5).float())
    prompts = [[5, 6, 7, 5, 6], [40, 41], [9]]
    values = measured(model, prompts, {"code": [0, 2], "chat": [1]}, rounds=1, new_tokens=12)
    assert list(values["drafters"]) == list(LABELS) == ["auto", "heads", "prompt-lookup"]
    assert all(drafter["identical_outputs"] == 3 for drafter in values["drafters"].values())
    json.dumps(values)


def test_repetition_counts_what_was_said_before():
    assert repeated_share([[1, 2, 3, 4, 5]]) == 0
    assert repeated_share([[1, 1, 1, 1, 1, 1]]) == pytest.approx(2 / 3)
    assert repeated_share([]) == 0


def report():
    return {
        "hf_tokens_per_s": 100.0, "plain_tokens_per_s": 150.0, "medusa_tokens_per_s": 300.0, "tokens_per_step": 2.5,
        "identical_outputs": {"count": 3, "total": 3, "dtype": "bfloat16"}, "nodes": 16,
        "head_top1": [0.6, 0.4], "head_top5": [0.8, 0.6],
        "head_top10": [0.9, 0.7], "prompts": 3, "dtype": "bfloat16", "fused": True, "threads": 2,
        "repeated_4grams": 0.25,
        "plain_speedup_over_transformers": 1.5,
        "drafters": {
            name: {
                "tokens_per_s": speed, "speedup": speed / 150, "tokens_per_step": 2.5, "identical_outputs": 3,
                "speedup_over_transformers": speed / 100, "tokens_per_step_maths": 2.0, "tokens_per_step_list": 3.0,
            }
            for name, speed in (("auto", 300.0), ("heads", 200.0), ("prompt-lookup", 180.0))
        },
    }  # fmt: skip


@pytest.mark.parametrize("real", [True, False])
def test_the_picture_and_the_tables_are_made(tmp_path, capsys, real):
    shown = report() | {"smollm2": report() if real else None}
    publish(tmp_path, shown)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text())["tokens_per_step"] == 2.5
    printed = capsys.readouterr().out
    assert "2.00x" in printed
    assert "identical to plain decoding, of 3 outputs: auto (default) 3, heads 3, prompt lookup 3" in printed
    assert ("SmolLM2-135M-Instruct: 3 prompts" in printed) == real
    assert str(tmp_path / "report.json") in printed


def test_a_failed_stage_is_one_line_and_fresh_removes_what_the_demo_wrote(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "thesis.txt").write_text("precious")
    monkeypatch.setattr(demo, "MEDUSA", (sys.executable, "-c", "raise SystemExit(3)"))
    assert demo.main(["--run", str(tmp_path), "--fresh"]) == 1
    assert capsys.readouterr().err == "a stage of the demo failed (exit status 3); its message is above\n"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("words", [["--prompts", "1"], ["--rounds", "0"], ["--train-prompts", "x"]])
def test_wrong_numbers_are_refused_at_once(words):
    with pytest.raises(SystemExit) as wrong:
        demo.main(words)
    assert wrong.value.code == 2


@pytest.mark.slow
def test_the_whole_demo_in_small(tmp_path, monkeypatch, capsys):
    for name, value in (("HELDOUT_PROMPTS", 8), ("MAX_NEW_TOKENS", 48), ("REAL_NEW_TOKENS", 16)):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(CLONES_CACHE))  # with the real base, once it was downloaded
    numbers = "--train-prompts 64 --prompts 4 --rounds 1 --real-prompts 2 --real-rounds 1".split()
    assert demo.main(["--run", str(tmp_path / "run"), *numbers]) == 0
    values = json.loads((tmp_path / "run" / "report.json").read_text())
    assert values["identical_outputs"] == {"count": 4, "total": 4, "dtype": "bfloat16", "against": "plain greedy"}
    assert values["tokens_per_step"] > 1
    assert len(values["head_top1"]) == 8
    assert set(values["drafters"]) == {"auto", "heads", "prompt-lookup"}
    assert all(drafter["identical_outputs"] == 4 for drafter in values["drafters"].values())
    for key in ("speedup", "plain_tokens_per_s", "medusa_tokens_per_s", "hf_tokens_per_s", "steps", "train_seconds"):
        assert values[key] > 0
    assert {"python", "torch", "transformers", "deepspeed"} <= set(values["versions"])
    assert values["fused"] == (shutil.which("g++") is not None)
    assert (tmp_path / "run" / "report.png").is_file()
    real = values["smollm2"]
    if real is None:
        assert "left out: base (smollm2) is not on this machine" in capsys.readouterr().out
    else:
        assert real["identical_outputs"]["count"] == 2
        assert real["drafters"]["heads"]["tokens_per_step"] >= 1  # on one thread drafts may not pay


def test_questions_of_a_file_have_kinds(model, tmp_path):
    path = tmp_path / "question.jsonl"
    lines = [("writing", "a\u2028a"), ("coding", "b"), ("qa", "c"), ("stem", "d"), ("qa", "x" * 300)]
    records = [{"category": kind, "turns": [text, "more"]} for kind, text in lines]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records) + "\n")
    prompts, kinds = file_questions(model, path, per_kind=2)
    assert kinds == {"mt_bench": [0, 1], "qa": [2]}
    assert prompts[2] == model.chat_prompt([{"role": "user", "content": "c"}])
    asked = {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "c"}],
        "category": "qa",
    }
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in (asked, {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}))
    )
    assert file_questions(model, path, per_kind=2) == (
        [model.chat_prompt(asked["messages"]), [5, 6]],
        {"qa": [0], "prompts": [1]},
    )
    path.write_text('{"category": "qa"}\n')
    with pytest.raises(ValueError, match=r"question.jsonl, line 1 is not a question"):
        file_questions(model, path, per_kind=2)
