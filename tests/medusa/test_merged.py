"""Adapters of fine-tuning as bases: merged once with the base that they name."""

import json
import logging
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from medusa import BaseModel, MedusaModel
from medusa.base import merged, smollm2
from medusa.data import load_tokenizer
from medusa.formats import save_heads
from medusa.io.hub import is_model
from medusa.train import check
from tests.medusa.test_conformance import config_of

peft = pytest.importorskip("peft")
PROMPT = list(range(60, 90))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tune(base_directory, tokenizer, tmp_path):
    """Saves a random adapter of the base; returns its directory, and the tuned model as peft computes it."""

    def tune(config=None, more_tokens=0, own_tokenizer=False):
        model = AutoModelForCausalLM.from_pretrained(base_directory, dtype=torch.float32)
        if more_tokens:
            model.resize_token_embeddings(len(tokenizer) + more_tokens, mean_resizing=False)
        torch.manual_seed(3)
        tuned = peft.get_peft_model(model, config or peft.LoraConfig(r=4, target_modules="all-linear"))
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter += 0.2 * torch.randn_like(parameter)
        tuned.save_pretrained(tmp_path / "tuned")
        if own_tokenizer:
            tokenizer.save_pretrained(tmp_path / "tuned")
        return tmp_path / "tuned", tuned.eval()

    return tune


def change(directory, **values):
    """Change the adapter's config."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


EVERY = {"target_modules": "all-linear"}
ENDS = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("config", "more_tokens"),
    [
        (lambda: peft.LoraConfig(r=4, use_rslora=True, **EVERY), 0),
        (lambda: peft.LoraConfig(r=4, use_dora=True, **EVERY), 0),
        (lambda: peft.LoraConfig(r=4, modules_to_save=ENDS, **EVERY), 0),
        (lambda: peft.LoraConfig(r=4, modules_to_save=ENDS, **EVERY), 3),
        (lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]), 0),
        (lambda: peft.LoraConfig(r=4, target_modules=["q_proj"]), 3),
        (lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]), 3),
        (lambda: peft.LoraConfig(r=4, trainable_token_indices=[60, 61], **EVERY), 0),
        (lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]), 0),
    ],
    ids=[
        "rsLoRA",
        "DoRA",
        "whole ends",
        "more tokens",
        "embeddings",
        "more tokens alone",
        "more tokens, embeddings",
        "some tokens",
        "LoHa",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_text_is_that_of_the_tuned_model(config, more_tokens, tune, base, make_heads, tmp_path):
    directory, tuned = tune(config(), more_tokens)
    expected = tuned.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    model = MedusaModel.from_pretrained(str(directory), dtype=torch.float32, device="cpu")
    assert model.generate(PROMPT, max_new_tokens=24).tokens == expected[0, len(PROMPT) :].tolist()
    assert model.base.vocab_size == base.vocab_size + more_tokens
    assert model.base.name == str(directory)
    assert model.base.source == f"weights of {Path(base.name).name} with the adapter tuned"


@pytest.mark.parametrize("ends", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.filterwarnings("ignore")
def test_one_end_of_a_model_with_tied_ends_is_changed_alone(ends, base_directory, tmp_path):
    """As the adapter was trained; merged by peft into the tied weight it would change both."""
    below = shutil.copytree(base_directory, tmp_path / "below")
    config = json.loads((below / "config.json").read_text())
    (below / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(below / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, below / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(below, dtype=torch.float32)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=ends, init_lora_weights=False)).eval()
    tuned.save_pretrained(tmp_path / "tuned")
    base = BaseModel.load(tmp_path / "tuned", torch.float32, "cpu")
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(base.model(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-4)


def test_heads_draft_for_it_without_changing_its_text(tune, base, model, make_heads, tmp_path):
    directory, tuned = tune()
    heads = save_heads(make_heads(base=str(directory)), tmp_path / "heads")
    loaded = MedusaModel.from_pretrained(heads, dtype=torch.float64, device="cpu")
    expected = tuned.double().generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    tokens = expected[0, len(PROMPT) :].tolist()
    assert loaded.generate(PROMPT, max_new_tokens=24, nodes=8).tokens == tokens
    assert model.generate(PROMPT, max_new_tokens=24).tokens != tokens, "the adapter changes the text"


def test_it_is_merged_once_and_again_when_it_has_changed(tune, caplog):
    directory, _ = tune()
    with caplog.at_level(logging.INFO, "medusa"):
        places = [smollm2.locate(str(directory)) for _ in range(2)]
        os.utime(directory / merged.WEIGHTS, ns=(1, 1))
        places.append(smollm2.locate(str(directory)))
        change(directory, lora_alpha=99)
        places.append(smollm2.locate(str(directory)))
    assert places[0] == places[1]
    assert len(set(places)) == 3
    assert sum("merging this adapter" in line for line in caplog.messages) == 3


def test_adapters_that_name_each_other_are_refused(tune, tmp_path):
    first, _ = tune()
    second = shutil.copytree(first, tmp_path / "second")
    for one, other in ((first, second), (second, first), (first, first)):
        change(one, base_model_name_or_path=str(other))
        if one is not first or other is first:
            with pytest.raises(ValueError, match=r"adapter \(.*\) needs itself as a base"):
                smollm2.locate(str(first))


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tune):
    directory, _ = tune(own_tokenizer=True)
    tokenizer = load_tokenizer(str(directory))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(directory)
    with pytest.raises(ValueError, match=r"has a tokenizer of 258 tokens and the model 257"):
        smollm2.locate(str(directory))


def test_a_check_of_a_recipe_merges_nothing(tune, tmp_path):
    directory, _ = tune()
    assert json.loads((Path(check._directory(str(directory))) / "config.json").read_text())["model_type"] == "llama"
    assert not (tmp_path / "cache").exists()


def test_an_adapter_of_an_adapter(tune, base, tmp_path):
    first, tuned = tune()
    second = shutil.copytree(first, tmp_path / "second")
    change(second, base_model_name_or_path=str(first))
    twice = MedusaModel.from_pretrained(None, base=second, dtype=torch.float32, device="cpu")
    once = peft.PeftModel.from_pretrained(tuned.merge_and_unload(), second).merge_and_unload()
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(twice.base.model(ids).logits, once(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_tokenizer_beside_the_adapter_is_its_own(tune, base):
    directory, _ = tune(own_tokenizer=True)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(str(directory)).chat_template == "{{ messages }}"
    assert base.tokenizer.chat_template != "{{ messages }}"


def test_an_adapter_on_the_hub(tune, base, tmp_path, monkeypatch):
    directory, _ = tune()

    def download(name, file, revision=None):
        raise EntryNotFoundError(f"{name} has no {file}")

    monkeypatch.setattr(smollm2, "_named", lambda name: name)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(directory))
    source = smollm2.source(smollm2.locate("ann/tuned"))
    assert source == f"weights of {Path(base.name).name} with the adapter ann/tuned", "nothing private"


def test_a_directory_is_an_adapter_or_something_else(tune, base, make_heads, tmp_path):
    directory, _ = tune()
    assert is_model(directory), "no heads: it is loaded as a base"
    assert not merged.is_adapter(base.name)
    assert not merged.is_adapter(save_heads(make_heads(), tmp_path / "heads"))
    (directory / "config.json").write_bytes((tmp_path / "heads" / "config.json").read_bytes())
    assert not merged.is_adapter(directory)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: change(path, base_model_name_or_path=None), "names no base; give it in its adapter_config.json"),
        (
            lambda path: change(path, base_model_name_or_path="./gone"),
            r"a base that is not there: base directory \(./gone\).*correct base_model_name_or_path",
        ),
        (lambda path: (path / merged.WEIGHTS).unlink(), "has no adapter_model.safetensors; save it again"),
        (lambda path: (path / merged.WEIGHTS).write_bytes(b"damaged"), "has a damaged adapter_model.safetensors: "),
        (lambda path: change(path, peft_type="?"), r"adapter \(.*tuned\) does not fit the base"),
    ],
    ids=["no base named", "base gone", "no weights", "damaged", "unknown kind"],
)
def test_what_cannot_be_merged_is_one_clear_error(harm, message, tune):
    directory, _ = tune()
    harm(directory)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        MedusaModel.from_pretrained(str(directory), device="cpu")


def test_a_base_that_lacks_weights_is_refused(tune, base_directory, tmp_path):
    directory, _ = tune()
    below = shutil.copytree(base_directory, tmp_path / "below")
    tensors = load_file(below / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, below / "model.safetensors", metadata={"format": "pt"})
    change(directory, base_model_name_or_path=str(below))
    message = r"base \(.*below\) of the adapter .* is damaged: its files lack 1 of the model's tensors"
    with pytest.raises(ValueError, match=message):
        MedusaModel.from_pretrained(str(directory), device="cpu")


def test_a_prompt_that_was_tuned_is_refused(tune):
    directory, _ = tune(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="is PROMPT_TUNING, which is no change of weights; give a LoRA adapter"):
        MedusaModel.from_pretrained(str(directory), device="cpu")


def test_a_quantised_base_is_refused(tune, base_directory, tmp_path):
    directory, _ = tune()
    below = shutil.copytree(base_directory, tmp_path / "below")
    config = json.loads((below / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (below / "config.json").write_text(json.dumps(config))
    change(directory, base_model_name_or_path=str(below))
    with pytest.raises(ValueError, match=r"changes a quantised base .* name the plain weights"):
        MedusaModel.from_pretrained(str(directory), device="cpu")


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_a_model_with_pictures_is_merged_into_its_language_model(tokenizer, tmp_path):
    text = config_of("qwen3_5_text", vocab_size=len(tokenizer)).to_dict()
    seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(1)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=seen)).eval()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "in_proj_qkv", "out_proj", "linear_fc1", "lm_head"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    tuned.save_pretrained(tmp_path / "tuned")
    change(tmp_path / "tuned", base_model_name_or_path=str(tmp_path / "base"))
    names = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    assert all(any(part in name for name in names) for part in ("visual", "lm_head"))
    ids = torch.arange(3, 40)[None]
    ours = BaseModel.load(tmp_path / "tuned", torch.float32, "cpu").model(ids).logits
    torch.testing.assert_close(ours, tuned(ids).logits, atol=1e-4, rtol=1e-4)
