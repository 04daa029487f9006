"""What passes and drafts cost as sizes grow, beside the cost model."""

import json

import pytest
import torch

from benchmarks.decoding.__main__ import main
from benchmarks.decoding.tables import scaling_lines
from benchmarks.step.cost import Rates, Work, draft_work, pass_work
from benchmarks.step.scaling import LONG, MANY, Sizes, find_rates, resized, short_rig
from benchmarks.step.shapes import SHAPES, random_heads, weight_bytes


def test_the_larger_of_reading_and_multiplying_counts():
    work = Work(weights=100, cached=30, linear=1000, attention=60)
    assert work.seconds(Rates(bandwidth=10)) == 13
    assert work.seconds(Rates(bandwidth=10, linear=50)) == 20 + 3
    assert work.seconds(Rates(bandwidth=10, linear=50, attention=12)) == 20 + 5


def test_the_work_of_a_pass_follows_the_shape(tiny, rig):
    work = pass_work(rig, nodes=5)  # batch 3, context 20
    assert work.weights == weight_bytes(tiny)
    assert work.cached == 3 * 20 * rig.kv_bytes_per_token
    assert work.linear == 2 * 15 * weight_bytes(tiny) / 4
    assert work.attention == 15 * 20 * 4 * 2 * 32  # two layers of four heads of 8


def test_a_level_reads_what_it_drafts(tiny):
    whole, part = random_heads(tiny, "recurrent", 4), random_heads(tiny, "recurrent", 4, draft_vocab=16)
    saved = draft_work(whole, 3).weights - draft_work(part, 3).weights
    assert saved == 3 * 4 * 32 * (64 - 16)
    assert draft_work(whole, 2).weights == 2 * draft_work(whole, 1).weights


def test_rates_come_from_many_rows_and_a_long_context():
    sizes = Sizes([16], [1], [1], [64], [1], tree=4)
    works = {
        ("tree", MANY, MANY): Work(1, 1, 900, 0),
        ("context", 16, 4): Work(1, 1, 0, 10),
        ("context", LONG, 4): Work(1, 1, 0, 210),
    }
    times = {("tree", MANY, MANY): [3.0], ("context", 16, 4): [1.0], ("context", LONG, 4): [5.0]}
    rates = find_rates(times | {("bandwidth", "sum"): [7.0]}, works, sizes, short=16)
    assert (rates.bandwidth, rates.linear, rates.attention) == (7, 300, 50)


def test_the_command_reports_every_size(tiny_config, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config.to_dict())
    monkeypatch.setattr("benchmarks.step.scaling.MANY", 16)
    monkeypatch.setattr("benchmarks.step.scaling.LONG", 48)
    sizes = ["--context", "8,32", "--batch", "1,2", "--nodes", "4", "--vocabulary", "64,128", "--levels", "1,2"]
    files = ["--json", str(tmp_path / "x.json"), "--picture", str(tmp_path / "x.png")]
    assert (
        main(["scaling", "--shape", "tiny", "--dtype", "float32", "--rounds", "1", "--tree", "4", *sizes, *files]) == 0
    )
    report = json.loads((tmp_path / "x.json").read_text())
    found = {(row["size"], row["value"], row["nodes"]) for row in report["rows"]}
    assert {("context", 32, 4), ("batch", 2, 1), ("tree", 4, 4), ("vocabulary", 128, 0), ("levels", 2, 0)} <= found
    assert all(row["ms"] > 0 and row["model_ms"] > 0 for row in report["rows"])
    lines = {(line["size"], line["value"]): line for line in scaling_lines(report)}
    assert lines["tree", "4"]["over"].endswith("x")
    assert lines["levels", "2"]["plain"] == ""
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "GFLOP/s" in capsys.readouterr().out


def test_passes_of_other_vocabularies_have_other_bases(tiny_config):
    shape = (tiny_config, torch.float32, torch.device("cpu"), Sizes([8], [1], [1], [64], [1], tree=4))
    assert short_rig(*shape, vocabulary=128).base.vocab_size == 128
    first = short_rig(*shape)
    assert resized(first, 16, batch=1).base is first.base
    assert first.base.context_length >= LONG + MANY


def test_a_long_first_context_is_one_message(tiny_config, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config.to_dict())
    assert main(["scaling", "--shape", "tiny", "--context", "4096"]) == 1
    assert "begin with one below 4096" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "a,b"])
def test_wrong_sizes_are_refused(value):
    with pytest.raises(SystemExit) as wrong:
        main(["scaling", "--context", value])
    assert wrong.value.code == 2
