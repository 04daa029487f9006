"""Bases of real shapes with random weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from medusa.benchmarks.step.shapes import random_base, random_model, shape_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_random_weights_are_repeatable_tied_and_sane(tiny_config):
    first, again = (random_model(tiny_config, torch.bfloat16, CPU) for _ in range(2))
    ids = torch.arange(9)[None]
    assert torch.equal(first(ids).logits, again(ids).logits)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}
    assert first.lm_head.weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.model.rotary_emb.inv_freq, LlamaForCausalLM(tiny_config).model.rotary_emb.inv_freq)


def test_layers_of_four_bits(tiny_config):
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    config = type(tiny_config).from_dict(tiny_config.to_dict() | sizes | {"head_dim": 64})
    base = random_base(config, None, CPU, packed=True)
    assert base.packed and base.dtype == torch.bfloat16
    first, second = (layer.mlp.gate_proj.packed for layer in base.model.model.layers[:2])
    assert torch.equal(first.parts, second.parts) and first.parts.data_ptr() != second.parts.data_ptr()
    assert base.logits(base.hidden_states(torch.arange(9)[None])).isfinite().all()
    with pytest.raises(ValueError, match="blocks of Q4_K have 256"):
        random_base(tiny_config, None, CPU, packed=True)


def test_both_sides_of_a_comparison_have_the_same_weights(tiny_config):
    base = random_base(tiny_config, torch.float32, CPU)
    theirs = random_model(tiny_config, torch.float32, CPU)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(base.logits(base.hidden_states(ids)), theirs(ids).logits)
    assert theirs.config._attn_implementation == "sdpa"
