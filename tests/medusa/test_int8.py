"""Products of 8 bits: another model, said so, and lossless towards itself."""

import pytest
import torch
from torch import nn

from medusa import BaseModel, MedusaModel
from medusa.cpu.int8 import Int8Linear, round_linears
from medusa.cpu.native import available
from medusa.cpu.packed import FOR_TILES, RUN, Packed
from medusa.loading.self_test import choose_decoding, fuse

pytestmark = pytest.mark.skipif(not available(), reason="no int8 kernels on this machine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_close_and_rows_do_not_know_each_other(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(384, 200).to(dtype)
    rows = torch.randn(9, 384).to(dtype) * torch.logspace(-3, 3, 9)[:, None].to(dtype)
    with torch.inference_mode():
        rounded = Int8Linear.of(linear)
        ours, theirs = rounded(rows), linear(rows)
        assert 1e-4 < (ours.float() - theirs.float()).norm() / theirs.float().norm() < 0.02
        for row in range(9):
            assert torch.equal(rounded(rows[row : row + 1])[0], ours[row])
        assert torch.equal(rounded(torch.zeros(1, 384, dtype=dtype))[0], linear.bias)


def test_every_run_of_a_row_is_rounded_by_its_own_largest_number():
    """A number a thousand times the others costs those of its own run only."""
    torch.manual_seed(0)
    linear, row = nn.Linear(4 * RUN, 50, bias=False), torch.randn(1, 4 * RUN)
    linear.weight.data[:, :RUN] = 0.0
    with torch.inference_mode():
        expected = Int8Linear.of(linear)(row)
        row[0, 3] = 1000.0
        assert torch.equal(Int8Linear.of(linear)(row), expected)


def test_small_weights_keep_their_size():
    torch.manual_seed(0)
    weight = torch.randn(64, 4 * RUN) * 1e-3
    error = Packed.rounded(weight).expand().float() - weight
    assert error.norm() < 0.01 * weight.norm()


@pytest.mark.parametrize("shape", [(5, 33), (37, 130), (1, 7), (130, 128)])
def test_sums_are_those_of_whole_numbers(shape):
    """Rows and weights that are whole numbers up to 127 need no rounding."""
    generator = torch.Generator().manual_seed(0)
    linear, rows = (
        nn.Linear(shape[1], shape[0], bias=False),
        torch.randint(-127, 128, (11, shape[1]), generator=generator),
    )
    linear.weight.data = torch.randint(-127, 128, shape, generator=generator).float()
    linear.weight.data[:, ::RUN], rows[:, ::RUN] = 127, 127
    with torch.inference_mode():
        ours = Int8Linear.of(linear)(rows.float())
    assert torch.equal(ours, (rows.double() @ linear.weight.double().T).float())


def test_a_column_of_zeros_stays_zero():
    linear = nn.Linear(64, 3, bias=False)
    linear.weight.data[1] = 0.0
    out = Int8Linear.of(linear)(torch.randn(2, 64))
    assert out[:, 1].tolist() == [0.0, 0.0]
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("shape", [(5, 33), (37, 130), (64, 96)])
def test_both_orders_hold_the_rounded_weights(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = Packed.rounded(weight)
    dots = packed.for_here(int8=True)
    assert (packed.int8, dots.int8) == (False, True)
    assert torch.equal(dots.ordered(FOR_TILES).parts, packed.parts)
    assert torch.equal(dots.expand(), packed.expand())
    assert (packed.expand().float() - weight).abs().max() < 0.02
    tokens = torch.randint(shape[0], (3, 2))
    assert torch.equal(dots.rows(tokens), packed.expand()[tokens])


@pytest.fixture
def rounded(base_directory):
    return BaseModel.load(base_directory, dtype=torch.float32, device="cpu", pack=True, int8=True)


def test_all_layers_but_the_output_layer_are_rounded(rounded):
    layers = [module for module in rounded.model.modules() if isinstance(module, Int8Linear)]
    assert rounded.int8
    assert len(layers) == 14
    assert not isinstance(rounded.model.get_output_embeddings(), Int8Linear)


def test_trees_are_lossless_towards_the_rounded_model(rounded, base_directory, make_heads):
    prompts = [[7, 8, 9], [65, 66, 67, 68, 69, 70, 71], [5]]
    model = MedusaModel(fuse(choose_decoding(rounded)), make_heads())
    plain = [output.tokens for output in model.generate(prompts, nodes=1, max_new_tokens=40)]
    assert [output.tokens for output in model.generate(prompts, nodes=9, max_new_tokens=40)] == plain
    assert model.base.fused
    unrounded = MedusaModel(BaseModel.load(base_directory, dtype=torch.float32, device="cpu"))
    assert [output.tokens for output in unrounded.generate(prompts, max_new_tokens=40)] != plain


def test_a_machine_without_kernels_gets_one_sentence(monkeypatch):
    monkeypatch.setattr("medusa.cpu.int8.available", lambda: False)
    with pytest.raises(ValueError, match=r"int8.*leave int8 out"):
        round_linears(nn.Sequential(nn.Linear(256, 256)))


def test_a_model_without_layers_to_round_is_not_called_rounded():
    with pytest.raises(ValueError, match=r"int8 rounds linear layers .* there are none; leave int8 out"):
        round_linears(nn.Sequential(nn.Linear(8, 8, dtype=torch.float64)))
