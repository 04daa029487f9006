import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, MptConfig, MptForCausalLM

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


def test_a_base_that_drops_the_plan_is_refused(base, monkeypatch):
    forward = base._decoder.forward

    def without_plan(*args, tree_plan=None, **options):
        return forward(*args, **options)

    monkeypatch.setattr(base._decoder, "forward", without_plan)
    with pytest.raises(UnsupportedBaseError):
        check_tree_decoding(base)
