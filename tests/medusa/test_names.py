"""Names of bases: the same everywhere, plain models in the place of heads, and what an error says of a wrong one."""

import logging
import shutil
import socket
import time

import huggingface_hub.constants
import pytest

from medusa import BaseModel, MedusaModel
from medusa.base import names, on_hub, smollm2
from medusa.benchmarks.arguments import build_parser as bench_flags
from medusa.benchmarks.questions import questions
from medusa.data import load_tokenizer
from medusa.data.options import parser as data_flags
from medusa.formats import load_heads, save_heads
from medusa.io.hub import fetch_heads
from medusa.serve.model_options import DEFAULT_HEADS, ModelOptions
from medusa.train.own.asked import CHAT, kind_of


@pytest.fixture
def shipped(base_directory, make_heads, monkeypatch, tmp_path):
    """Small models in the place of those that ship with the package."""
    monkeypatch.setattr(names, "SHIPPED", tmp_path)
    shutil.copytree(base_directory, tmp_path / "embedded" / "base")
    return tmp_path


@pytest.fixture
def silent(monkeypatch, tmp_path):
    """A Hub that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield


def test_a_plain_model_in_the_place_of_heads_is_loaded_alone_and_says_so(base_directory, caplog):
    with caplog.at_level(logging.WARNING, "medusa"):
        model = MedusaModel.from_pretrained(str(base_directory), device="cpu")
    assert model.heads is None
    assert f"{base_directory} is a model without heads: it is loaded alone" in caplog.text
    caplog.clear()
    MedusaModel.from_pretrained(base=base_directory, device="cpu")
    assert "without heads" not in caplog.text
    with pytest.raises(ValueError, match=r"are a whole model, and a base is named too \(embedded\); leave one"):
        MedusaModel.from_pretrained(str(base_directory), base="embedded")
    with pytest.raises(ValueError, match="neither heads nor a base is named; give one"):
        MedusaModel.from_pretrained()


def test_the_embedded_base_has_its_name_everywhere(shipped):
    place = str(shipped / "embedded" / "base")
    model = MedusaModel.from_pretrained("embedded", draft_model="embedded", device="cpu")
    assert model.heads is None
    assert model.base.name == model.drafters.parts.draft_model.name == place
    assert MedusaModel.from_pretrained(base="embedded", device="cpu").base.name == place
    assert BaseModel.load("embedded", device="cpu").name == place
    assert load_tokenizer("embedded").get_vocab() == model.base.tokenizer.get_vocab()


def test_a_missing_embedded_base_is_one_error_that_says_who_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(names, "SHIPPED", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is missing: only clones .* name another base, as smollm2"):
        MedusaModel.from_pretrained("embedded")


def test_commands_that_are_told_no_base_take_smollm2_where_the_embedded_one_is_missing(shipped, model):
    (shipped / "pretrained" / "smollm2").mkdir(parents=True)
    for base, heads in (("embedded", DEFAULT_HEADS), ("smollm2", str(shipped / "pretrained" / "smollm2"))):
        assert names.default_base() == base
        assert ModelOptions().heads_or_default() == heads
        assert bench_flags().parse_args(["step"]).base == base
        assert data_flags().parse_args(["inspect", "--source", "chats.jsonl"]).base == base
        assert names.is_embedded(shipped / "embedded" / "base") and not names.is_embedded(names.HUB_ID)
        assert kind_of(model, "") == CHAT and len(questions(model, None, 3)[0]) == 3
        shutil.rmtree(shipped / "embedded", ignore_errors=True)


def test_smollm2_brings_its_heads(shipped, base_directory, make_heads, monkeypatch):
    monkeypatch.setattr(smollm2, "_from_hub", lambda cached: base_directory)
    monkeypatch.setattr(smollm2, "cache_directory", lambda: shipped / "nothing")
    save_heads(make_heads(base=names.HUB_ID), shipped / "pretrained" / "smollm2")
    assert MedusaModel.from_pretrained("smollm2", device="cpu").heads is not None
    assert MedusaModel.from_pretrained(base="smollm2", device="cpu").heads is None


@pytest.mark.parametrize("load", [
    BaseModel.load, MedusaModel.from_pretrained, load_tokenizer, fetch_heads, smollm2.locate,
    lambda name: MedusaModel.from_pretrained(base=name),
])  # fmt: skip
def test_a_hub_that_does_not_answer_costs_three_seconds_at_most(silent, load, monkeypatch):
    assert on_hub.TIMEOUT <= 3
    monkeypatch.setattr(on_hub, "TIMEOUT", 0.1)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"is not on this machine, and the Hugging Face Hub .*: it cannot be re"):
        load("some/model")
    assert time.monotonic() - began < 2


def test_a_mistyped_name_is_told_what_is_near(silent, monkeypatch, tmp_path):
    monkeypatch.setattr(on_hub, "TIMEOUT", 0.1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "cache" / "models--qwen--qwen3").mkdir(parents=True)
    for name, meant in (
        ("smolm2", "smollm2"), ("embeded", "embedded"), ("models/lama", "models/llama"), ("qwen/qwen-3", "qwen/qwen3"),
    ):  # fmt: skip
        with pytest.raises(OSError, match=f"; did you mean {meant}"):
            BaseModel.load(name)
    with pytest.raises(FileNotFoundError, match=r"\(./models/lama\) does not exist; did you mean models/llama\?"):
        BaseModel.load("./models/lama")
    with pytest.raises(OSError) as refusal:  # noqa: PT011
        BaseModel.load("nothing-like-it")
    assert "did you mean" not in str(refusal.value)


def test_heads_find_their_base_alone_and_together_with_it(base_directory, make_heads, tmp_path):
    base = shutil.copytree(base_directory, tmp_path / "here" / "base")
    save_heads(make_heads(base=str(base)), tmp_path / "here" / "heads")
    alone = shutil.copytree(tmp_path / "here" / "heads", tmp_path / "far" / "away" / "heads")
    assert MedusaModel.from_pretrained(alone, device="cpu").base.name == str(base)
    together = (tmp_path / "here").rename(tmp_path / "there")
    assert MedusaModel.from_pretrained(together / "heads", device="cpu").base.name == str(together / "base")
    with pytest.raises(FileNotFoundError) as refusal:
        MedusaModel.from_pretrained(alone)
    assert f"neither from their directory ({alone}) nor from here (" in str(refusal.value)
    assert "give the base too, or put it there" in str(refusal.value)


def test_heads_of_a_file_find_it_alone_and_together_with_it(make_heads, tmp_path):
    file = tmp_path / "here" / "base.gguf"
    heads = save_heads(make_heads(base=str(file)), file.parent / "heads")  # the name alone: there is no file yet
    assert load_heads(heads).config.base == str(file)
    file.touch()
    save_heads(make_heads(base=str(file)), heads)
    alone = shutil.copytree(heads, tmp_path / "far" / "away" / "heads")
    assert names.resolve_base(load_heads(alone).config.base, alone) == str(file)
    together = file.parent.rename(tmp_path / "there")
    assert names.resolve_base(load_heads(together / "heads").config.base, together / "heads") == str(
        together / "base.gguf"
    )


def test_heads_of_the_embedded_base_name_it(shipped, make_heads, tmp_path):
    heads = save_heads(make_heads(base=str(shipped / "embedded" / "base")), tmp_path / "heads")
    assert '"base": "embedded"' in (heads / "config.json").read_text()
    assert MedusaModel.from_pretrained(heads, device="cpu").base.name == str(shipped / "embedded" / "base")


def test_the_embedded_base_has_one_name():
    assert names.full_name("embedded") == names.resolve_base("embedded")
