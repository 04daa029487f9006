"""``medusa bench`` on bases so small that only the logic is tested: what it measures, writes, shows and refuses."""

import io
import json

import pytest
import torch

from medusa import Speculation, load_settings
from medusa.attention import BACKENDS
from medusa.benchmarks import arguments
from medusa.benchmarks.__main__ import main
from medusa.benchmarks.step.shapes import SHAPES
from medusa.files import header
from medusa.heads import ARCHITECTURES
from medusa.io.settings_file import save_settings
from medusa.serve.chat.__main__ import main as chat


@pytest.mark.slow
def test_step_reports_a_row_per_batch_and_size(base_directory, tmp_path, capsys):
    sizes = ["--nodes", "4,2", "--batch", "1,3", "--context", "16", "--rounds", "2"]
    words = ["step", "--base", str(base_directory), *sizes]
    files = ["--json", str(tmp_path / "new" / "step.json"), "--picture", str(tmp_path / "step.png")]
    assert main([*words, *files, "--profile"]) == 0
    report = json.loads((tmp_path / "new" / "step.json").read_text())
    assert [(row["batch"], row["nodes"]) for row in report["rows"]] == [(b, n) for b in (1, 3) for n in (1, 2, 4)]
    for row in report["rows"]:
        assert row["verify_ms"] > 0
        assert len(row["rounds_step_ms"]) == 2
        bound = row["read_bytes"] / report["bandwidth_gb_per_s"] / 1e6
        assert row["roofline_ms"] == pytest.approx(bound, rel=0.01, abs=1e-4)
    assert all(row["step_overhead"] == 1.0 for row in report["rows"] if row["nodes"] == 1)
    assert "Self CPU" in report["profile"]
    assert report["command"].startswith("medusa bench step --base")
    assert (report["weights"], report["dtype"], report["threads"]) == ("real", "float32", torch.get_num_threads())
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "over N" in capsys.readouterr().out


def test_a_named_shape_runs_with_random_weights(tiny_config, monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config.to_dict())
    words = ["--shape", "tiny", "--architecture", "medusa", "--rounds", "1", "--context", "8", "--dtype", "float32"]
    assert main(["step", *words, "--nodes", "4", "--json", str(tmp_path / "step.json")]) == 0
    report = json.loads((tmp_path / "step.json").read_text())
    assert (report["base"], report["weights"], report["heads"]) == ("tiny", "random", "5 medusa, random")
    weights, logits, cached = 2 * 7680 + 64 * 32, 64, 9 * 2 * 2 * (2 * 8)
    assert report["rows"][0]["read_bytes"] == 4 * (weights + logits + cached)
    words = ["--shape", "tiny", "--dtype", "float32", "--count", "2", "--rounds", "1", "--max-new-tokens", "3"]
    assert main(["run", *words, "--batch", "1,2", "--json", str(tmp_path / "run.json")]) == 0
    for run in json.loads((tmp_path / "run.json").read_text())["runs"]:
        assert [row["method"] for row in run["rows"]][:2] == ["plain", "transformers"]
        assert all(row["identical"] == 2 for row in run["rows"]), "the same random weights on both sides"


def test_weights_of_8_bits_are_counted_and_called_lossy(tiny_config, monkeypatch, tmp_path, capsys):
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "head_dim": 64}
    monkeypatch.setitem(SHAPES, "wide", tiny_config.to_dict() | wide)
    words = ["step", "--shape", "wide", "--int8", "--rounds", "1", "--context", "8", "--nodes", "2"]
    assert main([*words, "--dtype", "float32", "--json", str(tmp_path / "x.json")]) == 0
    rounded = (3 * 1024 * 2048 + 2 * 1024 * (256 + 128)) * 34 // 32  # a scale of 2 bytes for 32 weights
    report = json.loads((tmp_path / "x.json").read_text())
    output, norms, turns, logits, cached = 64 * 1024, 3 * 1024, 64, 64, 9 * 2 * 2 * 64
    assert report["rows"][0]["read_bytes"] == rounded + 4 * (output + norms + turns + logits + cached)
    assert "LOSSY" in capsys.readouterr().out


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


def test_tuned_settings_are_a_file_that_the_chat_takes(model, base_directory, tmp_path, capsys, monkeypatch):
    model.save_pretrained(tmp_path / "heads")
    words = ["--heads", str(tmp_path / "heads"), "--base", str(base_directory), "--dtype", "float32"]
    sweep = ["--nodes", "3", "--count", "2", "--rounds", "1", "--max-new-tokens", "6", "--drafters", "heads,early-exit"]
    files = {name: str(tmp_path / name) for name in ("tuned.json", "report.json", "tune.png")}
    out = ["--out", files["tuned.json"], "--json", files["report.json"], "--picture", files["tune.png"]]
    assert main(["tune", *words, *sweep, *out, "--draft-model", str(base_directory), "--transformers"]) == 0
    assert "of the best fixed method" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["kind"], report["draft_model"]) == ("tune", str(base_directory))
    (swept,) = report["runs"]
    others = [f"transformers{name}" for name in ("", " prompt lookup", " assisted", " early exit")]
    assert [row["method"] for row in swept["rows"]] == ["plain", "auto", "heads 3", "early-exit 3", *others]
    assert all(row["identical"] == 2 for row in swept["rows"] if row["ours"])
    speeds = {row["method"]: row["over_plain"]["value"] for row in swept["rows"]}
    assert report["best"] == max(("plain", "heads 3", "early-exit 3"), key=lambda name: speeds[name])
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
    for flags, shown in (([], "prompt-lookup 4 now"), (["--draft-model", str(base_directory)], "draft-model+prompt")):
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
    with pytest.raises(ValueError, match="medusa bench tune --out"):
        load_settings(tmp_path / "x.json")
    values = header("settings") | {"drafter": "nobody", "nodes": 4}
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is not known"):
        load_settings(tmp_path / "x.json")


def test_the_parser_knows_all_names():
    assert set(arguments.ARCHITECTURES) == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "words",
    [
        [], ["step", "--nodes", "0"], ["step", "--nodes", "1,x"], ["step", "--batch", ""], ["step", "--rounds", "0"],
        ["step", "--base", "a", "--shape", "llama-1b"], ["tune", "--temperature", "0", "1"],
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
        (["step", "--device", "tpu9"], "device (tpu9) is not known"),
        (["attention", "--shape", "llama-1b", "--device", "meta"], "device (meta) cannot compute"),
        (["run", "--shape", "llama-1b", "--heads", "x"], "--heads cannot be combined with --shape"),
        (["accept", "--base", "embedded", "--drafters", "draft-model"], "drafter ('draft-model') needs a draft model"),
        (["tune", "--base", "embedded", "--nodes", "1"], "leave no guess to try"),
        (["step", "--base", "./no/such"], "base directory (./no/such) does not exist"),
        (["run", "--heads", "./no/such"], "heads directory (./no/such) does not exist"),
    ],
)
def test_failures_are_one_sentence_and_status_1(words, message, capsys):
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_ctrl_c(monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa.benchmarks.step.command.given_device", interrupt)
    assert main(["step"]) == 130
