"""The load-time check finds planted faults, in one layer too and in half precision, and takes no rounding for one."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import BaseModel
from medusa.loading.self_test import UnsupportedBaseError, choose_decoding
from tests.medusa.planted_faults import KINDS, plant

LAYERS = 3


@pytest.fixture(
    scope="module",
    params=[torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
def deep(request) -> BaseModel:
    """Layers are compared one by one, so that more of them would show nothing else."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    return BaseModel(LlamaForCausalLM(config).to(request.param), None, "deep")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("deep", "layer"),
    [
        (torch.bfloat16, LAYERS - 1),
        pytest.param(torch.float32, None, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, LAYERS // 2, marks=pytest.mark.slow),
        pytest.param(torch.float16, 0, marks=pytest.mark.slow),
    ],
    indirect=["deep"],
    ids=str,
)
def test_planted_faults_are_found(deep, kind, layer, monkeypatch):
    """Trees are refused, or masks travel with each call, where no plan reaches the fault.

    A fault that chains have too lets the base decode plainly, at most.
    """
    plant(monkeypatch, deep, kind, None if layer is None else [layer])
    assert found(choose_decoding(deep), kind)


def found(base, kind):
    return base.decoding != "tree" or (base.traits.explicit_mask and kind != "row")


def test_equally_right_passes_are_not_refused(deep, monkeypatch):
    plant(monkeypatch, deep, "rounding")
    chosen = choose_decoding(deep)
    assert (chosen.decoding, chosen.traits.explicit_mask) == ("tree", False)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def real(request, smollm2_directory) -> BaseModel:
    return BaseModel.load(smollm2_directory, dtype=request.param, device="cpu", pack=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layer"), list(zip(KINDS, [0, 29] * len(KINDS), strict=False)))
@pytest.mark.parametrize("real", [torch.bfloat16], indirect=True, ids=str)
def test_faults_in_one_layer_of_real_weights_are_found(real, kind, layer, monkeypatch):
    plant(monkeypatch, real, kind, [layer])
    assert found(choose_decoding(real), kind)


@pytest.mark.slow
def test_real_weights_verify_trees(real, monkeypatch):
    """Also where every operation around attention rounds otherwise than over plain text."""
    plant(monkeypatch, real, "rounding")
    chosen = choose_decoding(real)
    assert (chosen.decoding, chosen.traits.explicit_mask) == ("tree", False)


@pytest.mark.parametrize("deep", [torch.float32], indirect=True, ids=str)
def test_a_base_without_any_right_way_names_the_layer(deep):
    def scale(attention, args, options, output):
        return output if options.get("past_key_values") is None else (output[0] * 1.2, *output[1:])

    hook = deep.decoder.layers[1].self_attn.register_forward_hook(scale, with_kwargs=True)
    try:
        with pytest.raises(UnsupportedBaseError, match="attention of layer 2 differs from plain text by"):
            choose_decoding(deep)
    finally:
        hook.remove()
