"""``medusa-bench`` on bases so small that only the logic is tested: what it measures, writes, shows and refuses."""

import io
import json

import pytest
import torch

from benchmarks.decoding import arguments
from benchmarks.decoding.__main__ import main
from benchmarks.decoding.tune import best_settings, measure_arms
from benchmarks.replay.trace import Trace, save_trace
from benchmarks.step.shapes import SHAPES
from medusa import Speculation, load_settings
from medusa.attention import BACKENDS
from medusa.budget.tree_search import typical_tree
from medusa.files import header
from medusa.heads import ARCHITECTURES
from medusa.io.settings_file import save_settings
from serve.chat.__main__ import main as chat


@pytest.mark.slow
def test_step_reports_a_row_per_batch_and_size(base_directory, tmp_path, capsys):
    words = [
        "step",
        "--base",
        str(base_directory),
        "--nodes",
        "4,2",
        "--batch",
        "1,3",
        "--context",
        "16",
        "--rounds",
        "2",
    ]
    files = ["--json", str(tmp_path / "new" / "step.json"), "--picture", str(tmp_path / "step.png")]
    assert main([*words, *files, "--baseline", "--profile", "--memory-steps", "10"]) == 0
    report = json.loads((tmp_path / "new" / "step.json").read_text())
    assert [(row["batch"], row["nodes"]) for row in report["rows"]] == [(b, n) for b in (1, 3) for n in (1, 2, 4)]
    for row in report["rows"]:
        assert row["verify_ms"] > 0
        assert len(row["rounds_step_ms"]) == 2
        passes = report["weight_bytes"] + row["batch"] * 16 * report["kv_bytes_per_token"]
        assert row["roofline_ms"] == pytest.approx(passes / report["bandwidth_gb_per_s"] / 1e6, rel=0.01, abs=1e-4)
    assert all(row["step_overhead"] == 1.0 for row in report["rows"] if row["nodes"] == 1)
    assert [row["batch"] for row in report["baseline"]] == [1, 3]
    assert all(row["plain_over_transformers"] > 0 for row in report["baseline"])
    assert sum(report["profile"]["shares"].values()) == pytest.approx(1.0, abs=0.02)
    assert [mark["steps"] for mark in report["memory"]] == list(range(1, 11))
    assert report["command"].startswith("medusa-bench step --base")
    assert (report["weights"], report["dtype"], report["threads"]) == ("real", "float32", torch.get_num_threads())
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "over N" in capsys.readouterr().out


def test_a_named_shape_runs_with_random_weights(tiny_config, monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config.to_dict())
    words = ["--shape", "tiny", "--architecture", "medusa", "--rounds", "1", "--context", "8", "--dtype", "float32"]
    assert main(["step", *words, "--nodes", "4", "--baseline", "--json", str(tmp_path / "step.json")]) == 0
    report = json.loads((tmp_path / "step.json").read_text())
    assert (report["base"], report["weights"], report["heads"]) == ("tiny", "random", "5 medusa, random")
    assert report["weight_bytes"] == 4 * (2 * 7744 + 64 * 32 + 32)


def test_weights_of_8_bits_are_counted_and_called_lossy(tiny_config, monkeypatch, tmp_path, capsys):
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "head_dim": 64}
    monkeypatch.setitem(SHAPES, "wide", tiny_config.to_dict() | wide)
    words = ["step", "--shape", "wide", "--int8", "--rounds", "1", "--context", "8", "--nodes", "2"]
    assert main([*words, "--dtype", "float32", "--json", str(tmp_path / "x.json")]) == 0
    rounded = 3 * 1024 * 2048 + 2 * 1024 * (256 + 128)
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["weight_bytes"] == rounded + 4 * (64 * 1024 + 3 * 1024)
    assert "LOSSY" in capsys.readouterr().out


def test_replay_says_so_everywhere(base_directory, tmp_path, capsys):
    save_trace(Trace((1, 3, 9), {"drafter": "heads"}), tmp_path / "trace.json")
    words = ["--base", str(base_directory), "--nodes", "8", "--steps", "6", "--context", "16", "--rounds", "2"]
    files = ["--json", str(tmp_path / "replay.json"), "--picture", str(tmp_path / "replay.png")]
    assert main(["replay", "--trace", str(tmp_path / "trace.json"), "--batch", "1,2", *words, *files]) == 0
    report = json.loads((tmp_path / "replay.json").read_text())
    assert (report["kind"], report["label"]) == ("replay", "replay")
    assert report["trace"] == {"drafter": "heads", "tokens_per_step": 4.3333, "steps": 3}
    for row in report["rows"]:
        assert row["clamped_steps"] == 2 * row["batch"]
        assert row["replay_tokens_per_step"] == round((2 * (1 + 3) + 2 * (typical_tree(8, 4).tree.depth + 1)) / 6, 4)
        expected = row["replay_tokens_per_step"] / row["step_overhead"]
        assert row["replay_speedup"] == pytest.approx(expected, rel=1e-3)
    assert "REPLAY" in capsys.readouterr().out
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_attention_reports_every_backend_that_runs_beside_its_bound(base_directory, tmp_path, capsys):
    words = ["--base", str(base_directory), "--nodes", "1,4", "--batch", "2", "--context", "8", "--rounds", "1"]
    files = ["--json", str(tmp_path / "x.json"), "--picture", str(tmp_path / "x.png")]
    assert main(["attention", "--dtype", "float32", *words, *files]) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    sizes = [(row["backend"], row["nodes"]) for row in report["rows"] if row["backend"] == "reference"]
    assert sizes == [("reference", 1), ("reference", 4)]
    assert {row["backend"] for row in report["rows"]} | set(report["missing"]) == set(BACKENDS)
    for row in report["rows"]:
        # keys and values of 2 heads, queries and outputs of 4, all of 8 numbers of 4 bytes
        least = 2 * 8 * 4 * (2 * 2 * (8 + row["nodes"]) + 4 * 2 * row["nodes"])
        assert row["bound_ms"] == pytest.approx(least / report["bandwidth_gb_per_s"] / 1e6, rel=0.02, abs=1e-5)
        assert row["ms"] > 0
    assert "reference" in capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_drafters_and_sizes_are_swept_beside_auto_and_plain(model):
    kinds = {"short": [1], "long": [0]}
    swept = (model, [[5, 6, 7], [8]], kinds, ["heads", "prompt-lookup"], [4, 8, 1])
    figures = measure_arms(*swept, rounds=2, new_tokens=20)
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == ["plain", "auto", "heads 4", "heads 8", "prompt-lookup 4", "prompt-lookup 8"]
    assert rows["plain"]["tokens_per_step"] == rows["plain"]["speedup"] == 1.0
    assert all(row["identical"] == 2 for row in rows.values())
    assert rows["heads 4"]["accepted"] == f"{(rows['heads 4']['tokens_per_step'] - 1) / 3:.0%}"
    assert figures["best"] in rows and figures["best"] != "auto"
    assert figures["auto"].startswith("auto, batch of 1: ")
    assert list(figures["kinds"]) == ["short", "long"]
    assert [name.split()[0] for name in figures["kinds"]["short"]] == ["heads", "prompt-lookup", "auto"]
    way = best_settings(figures | {"best": "heads 8"})
    assert (way.drafter, way.nodes) == ("heads", 8)
    assert best_settings(figures | {"best": "plain"}).nodes == 1


def test_tuned_settings_are_a_file_that_the_chat_takes(model, base_directory, tmp_path, capsys, monkeypatch):
    model.save_pretrained(tmp_path / "heads")
    words = ["--heads", str(tmp_path / "heads"), "--base", str(base_directory), "--dtype", "float32"]
    sweep = ["--nodes", "3", "--count", "2", "--rounds", "1", "--max-new-tokens", "6", "--drafters", "heads,early-exit"]
    files = {name: str(tmp_path / name) for name in ("tuned.json", "report.json", "tune.png")}
    out = ["--out", files["tuned.json"], "--json", files["report.json"], "--picture", files["tune.png"]]
    assert main(["tune", *words, *sweep, *out, "--draft-model", str(base_directory), "--transformers"]) == 0
    shown = capsys.readouterr().out
    assert "accepted" in shown and "early-exit" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["kind"], report["draft_model"]) == ("tune", str(base_directory))
    others = [f"transformers{name}" for name in ("", " prompt lookup", " early exit", " draft model")]
    assert [row["name"] for row in report["rows"]] == ["plain", "auto", "heads 3", "early-exit 3", *others]
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    settings = load_settings(files["tuned.json"])
    assert f"{settings.drafter or 'plain'} {settings.nodes}".startswith(report["best"])
    save_settings(Speculation(drafter="early-exit", nodes=3), files["tuned.json"])
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/stats\n"))
    assert chat([*words, "--settings", files["tuned.json"], "--max-new-tokens", "8"]) == 0
    assert "nodes 3, drafter early-exit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        chat([*words, "--settings", files["tuned.json"], "--nodes", "4"])


def test_the_chat_without_heads_takes_what_there_is(base_directory, capsys, monkeypatch):
    words = ["--base", str(base_directory), "--dtype", "float32", "--max-new-tokens", "8"]
    for flags, shown in (([], "prompt-lookup 6 now"), (["--draft-model", str(base_directory)], "draft-model+prompt")):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert chat([*words, *flags]) == 0
        said = capsys.readouterr().err
        assert shown in said
        assert ("\ndraft  " in said) == bool(flags)
    assert chat([*words, "--mtp"]) == 1
    assert "has 0 multi-token-prediction layers" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "medusa-settings", "format_version": 1}'])
def test_settings_that_are_none_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="medusa-bench tune --out"):
        load_settings(tmp_path / "x.json")
    values = header("settings") | {"drafter": "nobody", "nodes": 4}
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is not known"):
        load_settings(tmp_path / "x.json")


def test_the_parser_knows_all_names():
    assert set(arguments.ARCHITECTURES) == set(ARCHITECTURES)
    assert ("auto", *BACKENDS) == arguments.ATTENTION


@pytest.mark.parametrize(
    "words",
    [
        [], ["step", "--nodes", "0"], ["step", "--nodes", "1,x"], ["step", "--batch", ""], ["step", "--rounds", "0"],
        ["step", "--base", "a", "--shape", "llama-1b"], ["replay", "--nodes", "1"], ["trace"], ["step", "--seed", "-1"],
    ],
)  # fmt: skip
def test_wrong_use_ends_with_status_2(words):
    with pytest.raises(SystemExit) as wrong:
        main(words)
    assert wrong.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--shape", "llama-9b"], "shape (llama-9b) is not known; choose one of: qwen3-0.6b"),
        (["step", "--int8", "--baseline"], "same weights"),
        (["step", "--device", "tpu9"], "device (tpu9) is not known"),
        (["replay", "--trace", "no/such.json"], "trace (no/such.json) does not exist"),
        (["step", "--base", "./no/such"], "base (./no/such) cannot be loaded"),
        (["trace", "--heads", "./no/such", "--out", "x.json"], "heads directory (./no/such) does not exist"),
    ],
)
def test_failures_are_one_sentence_and_status_1(words, message, capsys):
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_ctrl_c(monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.decoding.inputs.choose_device", interrupt)
    assert main(["step"]) == 130
