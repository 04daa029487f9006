"""Weights of 8 bits: another model, said so, and lossless towards itself."""

import pytest
import torch
from torch import nn

from medusa import BaseModel, MedusaModel
from medusa.cpu.int8 import Int8Linear, available, round_linears
from medusa.loading.self_test import choose_decoding

pytestmark = pytest.mark.skipif(not available(), reason="no int8 kernels on this machine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_close_and_rows_do_not_know_each_other(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(384, 200).to(dtype)
    rows = torch.randn(9, 384).to(dtype) * torch.logspace(-3, 3, 9)[:, None].to(dtype)
    with torch.inference_mode():
        ours, theirs = Int8Linear(linear)(rows), linear(rows)
        assert 1e-4 < (ours.float() - theirs.float()).norm() / theirs.float().norm() < 0.02
        for row in range(9):
            assert torch.equal(Int8Linear(linear)(rows[row : row + 1])[0], ours[row])
        assert torch.equal(Int8Linear(linear)(torch.zeros(1, 384, dtype=dtype))[0], linear.bias)


def test_a_column_of_zeros_stays_zero():
    linear = nn.Linear(64, 3, bias=False)
    linear.weight.data[1] = 0.0
    out = Int8Linear(linear)(torch.randn(2, 64))
    assert out[:, 1].tolist() == [0.0, 0.0]
    assert torch.isfinite(out).all()


@pytest.fixture
def rounded(base_directory, monkeypatch):
    monkeypatch.setattr("medusa.cpu.int8.MIN_WEIGHTS", 1)  # the tiny model's layers count as large
    return BaseModel.load(base_directory, dtype=torch.float32, device="cpu", pack=True, int8=True)


def test_all_layers_but_the_output_layer_are_rounded(rounded):
    layers = [module for module in rounded.model.modules() if isinstance(module, Int8Linear)]
    assert rounded.int8
    assert len(layers) == 14
    assert not isinstance(rounded.model.get_output_embeddings(), Int8Linear)


def test_trees_are_lossless_towards_the_rounded_model(rounded, base_directory, make_heads):
    model, prompts = MedusaModel(choose_decoding(rounded), make_heads()), [[7, 8, 9], [65, 66, 67, 68, 69, 70, 71], [5]]
    plain = [output.tokens for output in model.generate(prompts, nodes=1, max_new_tokens=40)]
    assert [output.tokens for output in model.generate(prompts, nodes=9, max_new_tokens=40)] == plain
    unrounded = MedusaModel(BaseModel.load(base_directory, dtype=torch.float32, device="cpu"))
    assert [output.tokens for output in unrounded.generate(prompts, max_new_tokens=40)] != plain


def test_a_machine_without_kernels_gets_one_sentence(monkeypatch):
    monkeypatch.setattr("medusa.cpu.int8.available", lambda: False)
    with pytest.raises(ValueError, match=r"int8.*leave int8 out"):
        round_linears(nn.Sequential(nn.Linear(256, 256)))


def test_a_model_of_small_layers_only_is_not_called_rounded(base_directory):
    with pytest.raises(ValueError, match=r"int8 rounds layers of at least .* there are none; leave int8 out"):
        BaseModel.load(base_directory, dtype=torch.float32, device="cpu", int8=True)
