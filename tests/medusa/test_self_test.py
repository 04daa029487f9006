import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MptConfig,
    MptForCausalLM,
)

from medusa import BaseModel, MedusaModel
from medusa.self_test import UnsupportedBaseError, check_tree_decoding


def test_a_llama_passes(base):
    check_tree_decoding(base)


def test_learned_positions_pass(tokenizer):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    )
    check_tree_decoding(BaseModel(model, tokenizer, "gpt2"))


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_alibi_is_refused_with_one_sentence(kind, tokenizer, tmp_path):
    torch.manual_seed(0)
    if kind == "bloom":
        model = BloomForCausalLM(
            BloomConfig(vocab_size=257, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.3)
        )
    else:
        model = MptForCausalLM(MptConfig(vocab_size=257, d_model=32, n_layers=2, n_heads=2, initializer_range=0.3))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedBaseError, match=rf"{kind}\) cannot verify trees"):
        MedusaModel.from_pretrained(None, base=tmp_path)


def test_a_base_that_drops_the_plan_gets_whole_masks(base, make_heads, monkeypatch):
    expected = MedusaModel(base).generate("def f(x):", max_new_tokens=20).tokens
    without_plan(base, monkeypatch)
    check_tree_decoding(base)
    assert base.explicit_mask
    assert MedusaModel(base, make_heads()).generate("def f(x):", max_new_tokens=20).tokens == expected


def test_a_base_with_windows_that_drops_the_plan_is_refused(base, monkeypatch):
    without_plan(base, monkeypatch)
    monkeypatch.setattr(base.config, "sliding_window", 100, raising=False)
    with pytest.raises(UnsupportedBaseError, match="tree logits differ"):
        check_tree_decoding(base)
    assert not base.explicit_mask


def without_plan(base, monkeypatch):
    forward = base._decoder.forward

    def dropping(*args, tree_plan=None, **options):
        return forward(*args, **options)

    monkeypatch.setattr(base._decoder, "forward", dropping)
    monkeypatch.setattr(base, "explicit_mask", False)  # set back at the end: the base serves other tests too


@pytest.mark.parametrize("kind", ["llama4_text", "mamba"])
def test_other_families_are_refused_at_load(kind, tokenizer):
    torch.manual_seed(0)
    shape = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_local_experts": 2,
    }
    shape |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    with pytest.raises(UnsupportedBaseError, match="cannot verify trees"):
        check_tree_decoding(BaseModel(model, tokenizer, kind))
