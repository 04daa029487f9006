"""``medusa serve --dry-run``: a plan from a config alone."""

import json
import shutil
from pathlib import Path

import pytest

from medusa import HeadsConfig, build_heads
from medusa.data.arguments import memory_size
from medusa.formats import save_heads
from medusa.serve.engine import MEMORY
from medusa.serve.server import main


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Nothing may be loaded, downloaded or served."""

    def never(*_, **__):
        raise AssertionError("a dry run loads nothing")

    monkeypatch.setattr("medusa.MedusaModel.from_pretrained", never)
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    monkeypatch.setattr("uvicorn.Server.run", never)


@pytest.fixture
def config_file(base_directory, tmp_path):
    """A config.json without weights beside it."""
    return Path(shutil.copy(base_directory / "config.json", tmp_path / "config.json"))


def plan(capsys, *flags):
    assert main(["--dry-run", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("base", ["embedded", "smollm2"])
def test_known_bases_are_planned_without_a_network(base, capsys):
    text = plan(capsys, "--base", base, "--device-memory", "24GiB")
    assert f"{24 * 2**30 / 1e9:.2f} GB of memory" in text
    assert "recorded steps" in text
    assert "--cache-tokens" in text
    assert ("heads" in text) == (base == "smollm2"), "the repository ships heads for it"


def test_a_config_file_or_its_directory_is_enough(config_file, capsys):
    for place in (config_file, config_file.parent):
        assert "a position takes 256 bytes" in plan(capsys, "--base", str(place), "--dtype", "float32")


def test_an_adapter_takes_what_its_base_takes(config_file, tmp_path, capsys):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(config_file.parent)})
    )
    texts = [plan(capsys, "--base", str(base)) for base in (config_file.parent, tmp_path / "tuned")]
    assert texts[0].partition("\n")[2] == texts[1].partition("\n")[2]


def test_an_adapter_s_base_is_planned_in_plain_weights(config_file, tmp_path, capsys):
    """A quantised base is expanded for it, on any device."""
    (tmp_path / "quantised").mkdir()
    config = json.loads((config_file.parent / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "quantised")}))
    for more in ((), ("--device-memory", "8e9")):
        flags = ("--dtype", "bfloat16", *more)
        assert "16 bits a weight" in plan(capsys, "--base", str(tmp_path), *flags)
        assert ("4 bits" if more else "bits") in plan(capsys, "--base", str(tmp_path / "quantised"), *flags)


def test_without_a_size_it_is_this_machine(config_file, capsys, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**6}.__getitem__)
    text = plan(capsys, "--base", str(config_file))
    assert "on 4.10 GB of memory" in text
    assert f"KV cache            {MEMORY * 4.096:.2f} GB" in text
    assert "recorded" not in text


def test_limits_are_those_of_the_server(config_file, capsys):
    flags = ("--base", str(config_file), "--device-memory", "8e9")
    text = plan(capsys, *flags, "--max-batch", "2", "--prefill-rows", "100", "--cache-tokens", "320")
    assert f"of {2 * 64} rows" in text
    assert "buckets of 2 requests\n" in text
    assert "10 blocks of 32 = 320 positions" in text
    text = plan(capsys, *flags, "--max-batch", "3", "--prefill-rows", "100")
    assert f"of {4 * 64} rows" in text, "a step is recorded for a power of two"
    text = plan(capsys, *flags, "--no-graph", "--max-batch", "3", "--prefill-rows", "100")
    assert "recorded" not in text
    assert f"of {3 * 64 + 100} rows" in text, "prompts are computed beside the trees"


def test_heads_that_are_named_take_memory(config_file, base, tmp_path, capsys):
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 2, base="x", architecture="recurrent"))
    save_heads(heads, tmp_path / "heads")
    text = plan(capsys, "--base", str(config_file), "--heads", str(tmp_path / "heads"), "--dtype", "float32")
    size = 4 * sum(weight.numel() for weight in heads.parameters())
    assert f"{size / 1e6:.1f} MB" in next(line for line in text.splitlines() if line.startswith("  heads"))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "name it with --base"),
        (["--base", "/nowhere/config.json"], "cannot be read"),
        (["--base", "embedded", "--device-memory", "10MB"], "exceed the memory"),
        (["--base", "embedded", "--heads", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_planned_is_one_message(flags, reason, caplog):
    assert main(["--dry-run", *flags]) == 1
    assert reason in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("8e9", 8 * 10**9), ("1.5 g", 15 * 10**8), ("7B", 7)],
)
def test_sizes(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "80XB", "-1GB", "0", "GB", "1e9e9"])
def test_a_wrong_size_is_wrong_use(text, capsys):
    with pytest.raises(SystemExit) as wrong:
        main(["--dry-run", "--base", "embedded", f"--device-memory={text}"])
    assert wrong.value.code == 2
    assert f"size ({text}) must be a positive number of bytes" in capsys.readouterr().err
