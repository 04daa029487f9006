"""``medusa export``: heads through every format, what it refuses, and what ``inspect`` sees in damaged ones."""

import json
import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2Config, LlamaConfig

from medusa.formats import FORMATS, find_format, holders, load_heads, save_heads
from medusa.io import export
from medusa.io.command import main
from medusa.io.hub import CARD_MARK
from tests.medusa.formats.hub_stand_in import TOKEN, hub_stand_in
from tests.medusa.formats.stored import change_config, load_config

SHAPES = {
    "shared": {"architecture": "medusa"},
    "own": {"architecture": "medusa", "own_lm_heads": True},
    "recurrent": {"architecture": "recurrent", "feature_layers": (1,)},
}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def saved(make_heads, tmp_path_factory):
    """Directories of native heads by the name of their shape."""
    root = tmp_path_factory.mktemp("saved")
    return {
        name: save_heads(make_heads(**options).float(), root / name / "heads", {"note": name})
        for name, options in SHAPES.items()
    }


def run(*words):
    """Exit status of the command, wrong use included."""
    try:
        return main([str(word) for word in words])
    except SystemExit as exit_:
        return exit_.code


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_format_is_written_and_recognised_or_refused(saved, base, tmp_path, capsys, shape, name):
    source, out = load_heads(saved[shape]), tmp_path / "out"
    if name not in holders(source.config):
        assert run("--heads", saved[shape], "--format", name, "--out", out) == 1
        assert capsys.readouterr().err.startswith(f"format '{name}' ")
        assert not out.exists()
        return
    report = tmp_path / "made" / "report.json"
    assert run("--heads", saved[shape], "--format", name, "--out", out, "--json", report) == 0
    assert json.loads(report.read_text()) == {
        "kind": "export", "heads": str(saved[shape]), "format": name, "base": base.name, "out": str(out),
    }  # fmt: skip
    assert CARD_MARK in (out / "README.md").read_text()
    exported = load_heads(out).state_dict()
    assert exported.keys() == source.state_dict().keys()
    for key, tensor in source.state_dict().items():
        assert torch.equal(exported[key], tensor), key
    capsys.readouterr()
    assert run("inspect", out, "--json", report) == 0
    seen = json.loads(report.read_text())
    assert (seen["format"], seen["problems"]) == (find_format(out).name, [])
    assert [format_ for format_, obstacle in seen["exports"].items() if not obstacle] == holders(load_config(out))
    shown = capsys.readouterr().out
    assert f"format           {find_format(out).name} (" in shown
    assert "heads            3\n" in shown
    assert "PROBLEM" not in shown


@pytest.mark.parametrize("name", ["native", "custom-generate", "medusa-v1"])
def test_an_export_that_was_stopped_starts_again(saved, tmp_path, monkeypatch, name):
    def stopped(*_):
        raise KeyboardInterrupt

    shape = "own" if name == "medusa-v1" else "recurrent"
    words = ["--heads", saved[shape], "--format", name, "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:
        patch.setattr(export, "write_card", stopped)
        assert run(*words) == 130
    assert not (tmp_path / "out").exists()
    assert run(*words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run(*words) == 0, "over itself"


def test_a_file_is_not_replaced(saved, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert run("--heads", saved["own"], "--format", "native", "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err == f"out ({tmp_path / 'out'}) is a file; give a directory\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_full_disk_is_one_sentence(saved, tmp_path, monkeypatch, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        assert run("--heads", saved["own"], "--format", "native", "--out", tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.fullmatch(r"heads file \(.*\) cannot be written: .*; make room, .*\n", capsys.readouterr().err)


def test_native_heads_keep_what_belongs_to_them(saved, tmp_path):
    out = tmp_path / "out"
    assert run("--heads", saved["recurrent"], "--format", "native", "--out", out, "--dtype", "bfloat16") == 0
    assert json.loads((out / "provenance.json").read_text()) == {"note": "recurrent"}
    assert {tensor.dtype for tensor in load_file(out / "heads.safetensors").values()} == {torch.bfloat16}


def test_heads_name_the_base_that_is_given(saved, tmp_path):
    assert run("--heads", saved["shared"], "--format", "tgi", "--out", tmp_path / "out", "--base", "user/base") == 0
    assert run("--heads", saved["own"], "--format", "vllm", "--out", tmp_path / "vllm", "--base", "user/base") == 0
    assert load_config(tmp_path / "out").base == "user/base"
    assert "base_model: user/base\n" in (tmp_path / "out" / "README.md").read_text()


def test_heads_are_replaced_and_other_directories_are_not_touched(saved, tmp_path, capsys):
    words = ("--heads", saved["shared"], "--format", "tgi", "--out")
    assert run(*words, tmp_path / "out") == run(*words, tmp_path / "out") == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("mine")
    for other in (tmp_path / "run", saved["own"]):
        before = sorted(other.iterdir())
        assert run(*words, other) == 1
        assert "holds something else than 'tgi' heads; give a new directory" in capsys.readouterr().err
        assert sorted(other.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--format gguf --out out", 2, "invalid choice: 'gguf'"),
        ("--format native --out heads", 2, "is the directory of the heads"),
        ("--format native --out out --private", 2, "--private belongs to a push; give --push user/repo too"),
        ("--format native --out out --push heads", 2, "--push (heads) must be named with its owner"),
        ("--format native --out out --push ./heads", 2, "--push (./heads) must be named with its owner"),
        ("--format native --out out --message x", 2, "--message belongs to a push"),
        ("--format native --out out --heads ./nothing", 1, "heads directory (./nothing) does not exist"),
        ("--format native --out out --base ./nothing", 1, "base directory (./nothing) does not exist"),
        ("--format native --out out --json heads/config.json/x", 1, "File exists"),
    ],
)
def test_what_is_refused(saved, monkeypatch, tmp_path, capsys, words, status, said):
    monkeypatch.chdir(tmp_path)
    Path("heads").symlink_to(saved["shared"])
    assert run("--heads", "heads", *words.split()) == status
    error = capsys.readouterr().err
    assert said in error
    assert status == 2 or len(error.splitlines()) == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["native", "medusa-v2", "custom-generate"])
def test_a_base_of_another_size_is_refused(saved, tmp_path, capsys, name):
    LlamaConfig(hidden_size=64).save_pretrained(tmp_path / "base")
    words = ("--format", name, "--out", tmp_path / "out", "--base", tmp_path / "base")
    assert run("--heads", saved["shared"], *words) == 1
    assert re.match(r"heads' hidden size \(32\) is not the base's \(64, .*base\); ", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["folder", "cache of the Hub"])
def test_what_a_format_cannot_do_with_the_base_is_said_before_writing(saved, tmp_path, monkeypatch, capsys, where):
    shape = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    Lfm2Config(**shape, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    if where != "folder":
        base = "user/base"
        monkeypatch.setattr(export, "kept_directory", lambda name: str(tmp_path / "base") if name == base else "")
    words = ("--heads", saved["shared"], "--base", base, "--out", tmp_path / "out", "--format")
    assert run(*words, "custom-generate") == 1
    assert capsys.readouterr().err == (
        "format 'custom-generate' cannot be used with models of a kind that has recurrent layers, and the base"
        f" ({base}, lfm2) is one; choose 'native'\n"
    )
    assert not (tmp_path / "out").exists()
    assert run(*words, "native") == 0


WEIGHTS = "medusa_lm_head.safetensors"


def truncate(heads):
    (heads / WEIGHTS).write_bytes((heads / WEIGHTS).read_bytes()[:-100])


def replace(name, text):
    return lambda heads: (heads / name).write_text(text)


def remove(name):
    return lambda heads: (heads / name).unlink()


def poison(heads):
    tensors = load_file(heads / WEIGHTS)
    tensors["0.0.linear.bias"][3] = float("nan")
    save_file(tensors, heads / WEIGHTS)


def poison_output(heads):
    save_file({"lm_heads.0.weight": torch.full((3, 3), torch.inf)}, heads / "more.safetensors")


DAMAGES = {
    "truncated": (truncate, f"{WEIGHTS}) is damaged"),
    "no config": (remove("config.json"), "has no config.json"),
    "no JSON": (replace("config.json", "{"), "is not valid JSON"),
    "another model": (replace("config.json", "{}"), "is not of a known format"),
    "no weights": (remove(WEIGHTS), "is not of a known format"),
    "not a number": (poison, "0.0.linear.bias holds numbers that are not finite"),
    "head count": (partial(change_config, medusa_num_heads=2), "says medusa_num_heads 2, but the tensors hold 3"),
    "no base": (partial(change_config, base_model_name_or_path=""), "do not name their base"),
    "shipped layer": (poison_output, "tensor lm_heads.0.weight holds numbers that are not finite"),
    "base is gone": (
        partial(change_config, base_model_name_or_path="/gone/base"),
        "base directory (/gone/base) does not exist",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_inspect_tells_what_is_wrong(saved, tmp_path, capsys, damage):
    heads, report = tmp_path / "heads", tmp_path / "report.json"
    run("--heads", saved["shared"], "--format", "medusa-v2", "--out", heads)
    harm, said = DAMAGES[damage]
    harm(heads)
    capsys.readouterr()
    assert run("inspect", heads, "--json", report) == 1
    shown = capsys.readouterr()
    (problem,) = json.loads(report.read_text())["problems"]
    assert said in problem
    assert f"PROBLEM          {problem}\n" in shown.out
    assert shown.err == ""
    tensors = {tensor["name"]: tensor["shape"] for tensor in json.loads(report.read_text())["tensors"]}
    readable = damage not in ("truncated", "no weights")
    assert ("0.0.linear.weight" in tensors) == readable  # whatever else is wrong


def test_inspect_sees_what_else_loading_needs(saved, tmp_path, capsys):
    heads = tmp_path / "heads"
    run("--heads", saved["shared"], "--format", "native", "--out", heads)
    assert run("inspect", heads) == 0
    change_config(heads, base_adapter="adapter")
    assert run("inspect", heads) == 1
    assert "adapter) does not exist and the heads need it" in capsys.readouterr().out
    change_config(heads, base_adapter="")
    (heads / "calibration.json").write_text("{")  # older heads have one, and nothing reads it
    assert run("inspect", heads) == 0


@pytest.mark.parametrize("name", ["universal", "vllm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_output_layer_of_the_base_is_shipped_as_it_is_stored(base_directory, saved, tmp_path, name, dtype):
    model, theirs = AutoModelForCausalLM.from_pretrained(base_directory, dtype=dtype), tmp_path / "base"
    model.save_pretrained(theirs)
    AutoTokenizer.from_pretrained(base_directory).save_pretrained(theirs)
    run("--heads", saved["shared"], "--base", theirs, "--format", name, "--out", tmp_path / "out")
    tensors = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors |= load_file(path)
    shipped = tensors.get("lm_heads.0.weight", tensors.get("lm_head.weight"))
    assert shipped.dtype == dtype
    assert torch.equal(shipped, model.lm_head.weight)


@pytest.mark.parametrize("provenance", [
    {"versions": 3}, {"versions": [1]}, {"figures": 3}, {"figures": [1]}, {"totals": {"train_seconds": "x"}},
    {"figures": {"heldout_top1": [0.5, 0.2], "heldout_top5": [0.5], "heldout_samples": 3}},
])  # fmt: skip
def test_odd_provenance_of_others_is_left_out_of_the_card(make_heads, tmp_path, provenance):
    source = tmp_path / "theirs"
    save_heads(make_heads(architecture="medusa"), source, provenance)
    assert run("--heads", source, "--format", "tgi", "--out", tmp_path / "out") == 0
    assert "# Draft heads for" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_from_the_command_line_to_the_hub_and_back(saved, base, tmp_path):
    """As users run it: settings by environment variables, two processes, only the Hub between them."""
    with hub_stand_in() as hub:
        variables = os.environ | {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip

        def medusa(*words):
            return subprocess.run(
                [sys.executable, "-m", "medusa", "export", *map(str, words)],
                cwd=ROOT, env=variables, capture_output=True, text=True, check=False,
            )  # fmt: skip

        push = ("--push", "tester/heads", "--private", "--message", "A test")
        options = ("--format", "universal", "--out", tmp_path / "out", *push)
        pushed = medusa("--heads", saved["shared"], *options)
        assert pushed.returncode == 0, pushed.stderr
        assert pushed.stdout == f"universal: {tmp_path / 'out'}\n{hub.url}/tester/heads\n"
        assert f"base ({base.name}) is not on the Hub, so others cannot load it" in pushed.stderr
        assert TOKEN not in pushed.stderr
        assert hub.repositories["tester/heads"].private
        assert hub.repositories["tester/heads"].messages == ["initial commit", "A test"]
        seen = medusa("inspect", "tester/heads")
        assert seen.returncode == 1, "where the base lies on the disk that pushed them is not told"
        assert "format           universal (" in seen.stdout
        assert f"base (./{Path(base.name).name}) is not where these heads name it, neither from" in seen.stdout
        assert base.name not in seen.stdout
