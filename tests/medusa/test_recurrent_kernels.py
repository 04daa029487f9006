"""What recurrent layers compute, by the kernels and without them, and whole passes in our own kernels."""

import pytest
import torch

from medusa import BaseModel
from medusa.base.recurrent_block import mixer_of
from medusa.cache import CachedSequence
from medusa.cpu import native
from medusa.cpu.int8 import round_linears
from medusa.loading import exactness
from medusa.loading.self_test import choose_decoding, fuse
from medusa.recurrence import RecurrentPass
from medusa.recurrence.rules import CHUNK, convolve, recur
from medusa.tree import Draft
from tests.medusa.test_recurrent import FUSED, KINDS, build


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("delta", [False, True])
def test_rows_of_trees_and_long_chains_are_those_of_single_steps(delta, dtype):
    """Against the recurrence itself, token by token, in float64; the kernel computes float32."""
    torch.manual_seed(0)
    texts, rows, heads, keys, values = 2, 2 * CHUNK + 9, 3, 21, 70
    query, key = torch.randn(2, texts, rows, heads, keys, dtype=torch.float64) * 0.2
    value = torch.randn(texts, rows, heads, values, dtype=torch.float64)
    decay, rate = -torch.rand(texts, rows, heads).double(), torch.rand(texts, rows, heads).double()
    state = torch.randn(texts, heads, keys, values, dtype=torch.float64)
    rates = rate if delta else None

    def step(before, row):
        before = decay[:, row].exp()[..., None, None] * before
        new = value[:, row]
        if delta:
            new = rate[:, row, :, None] * (new - (before.mT @ key[:, row, :, :, None])[..., 0])
        after = before + key[:, row, :, :, None] * new[:, :, None]
        return after, (after.mT @ query[:, row, :, :, None])[..., 0]

    def by_hand(parents):
        states, outs = [], []
        for row, parent in enumerate(parents):
            after, out = step(state if row == 0 else states[parent], row)
            states.append(after)
            outs.append(out)
        return torch.stack(outs, dim=1), states[-1]

    close = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 2e-4, "rtol": 2e-4}
    given = [None if x is None else x.to(dtype) for x in (query, key, value, decay, rates)]
    out, end = recur(*given, state.to(dtype))
    expected = by_hand([0, *range(rows - 1)])
    torch.testing.assert_close((out.double(), end.double()), expected, **close)
    assert torch.equal(recur(None, *given[1:], state.to(dtype))[1], end)
    parents = [0, 0, 0, 1, 1, 2, 4, 6, 5]
    seen = Draft.of(torch.zeros(1, 9, dtype=torch.int64), torch.tensor([parents]), 8).ancestors.expand(texts, -1, -1)
    tree = [None if x is None else x[:, :9] for x in given]
    out, end = recur(*tree, state.to(dtype), seen)
    torch.testing.assert_close(out.double(), by_hand(parents)[0], **close)
    assert end is None


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_convolutions_are_those_of_torch(dtype, silu):
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(9, 37).to(dtype), torch.randn(37, 4).to(dtype), torch.randn(37).to(dtype)
    taken = torch.arange(6)[:, None] + torch.arange(4)
    out = torch.nn.functional.conv1d(inputs.double().T[None], weight.double()[:, None], bias.double(), groups=37)[0].T
    expected = torch.nn.functional.silu(out) if silu else out
    close = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(convolve(inputs, taken, weight, bias, silu).double(), expected, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_bases_with_kernels_are_exact(kind, dtype, tokenizer):
    """Bit by bit: in chunks, beside other texts, in trees. torch's sigmoids are so for whole vectors of heads."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 16 if dtype == torch.bfloat16 else 32}
    model = build(kind, tokenizer, **heads, linear_value_head_dim=8).to(dtype)
    native.use_kernels(model)
    assert exactness.find_out(choose_decoding(BaseModel(model, tokenizer, kind))).exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_passes_are_exact(kind, dtype, tokenizer):
    """For any number of heads: 6 heads of values with 3 of keys, 6 of attention."""
    odd = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_value_head_dim": 10, "hidden_size": 36}
    odd |= {"mamba_n_heads": 6, "mamba_d_head": 12, "mamba_n_groups": 3}
    model = build(kind, tokenizer, **odd, num_attention_heads=6).to(dtype)
    native.use_kernels(model)
    base = fuse(choose_decoding(BaseModel(model, tokenizer, kind)))
    assert base.fused and exactness.find_out(base).exact


@pytest.mark.parametrize("kind", FUSED)
def test_fused_passes_read_layers_in_8_bits(kind, tokenizer):
    model = build(kind, tokenizer, intermediate_size=64, shared_intermediate_size=64).to(torch.bfloat16)
    round_linears(model, output=model.get_output_embeddings())
    base = fuse(choose_decoding(BaseModel(model, tokenizer, kind, int8=True)))
    assert base.fused and exactness.find_out(base).exact


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.001, 0.1)])
@pytest.mark.parametrize("kind", ["bamba", "granitemoehybrid"])
def test_steps_of_mamba_are_bounded_as_the_family_rounds(kind, limits, tokenizer):
    model = build(kind, tokenizer).to(torch.bfloat16)
    for layer in model.model.layers:
        if getattr(layer, "mamba", None) is not None:
            layer.mamba.time_step_limit = limits
    eager = choose_decoding(BaseModel(model, tokenizer, kind))
    chain = Draft.chain(torch.tensor([[3 + n % 50 for n in range(60)]]))

    def hidden(base):
        pool = base.new_pool()
        with torch.inference_mode():
            return base.run(pool, base.plan([(chain, [CachedSequence(pool)])])).float()

    theirs = hidden(eager)
    assert (hidden(fuse(eager)) - theirs).norm() < 2e-3 * theirs.norm()


@pytest.mark.parametrize("name", ["reach", "windows"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba"])
def test_a_pass_that_mixes_up_texts_is_found_at_load(kind, name, tokenizer, monkeypatch):
    base, right = choose_decoding(BaseModel(build(kind, tokenizer), tokenizer, kind)), getattr(RecurrentPass, name)

    def wrong(own, *args):
        first, *others = right(own, *args)
        return [first] * (1 + len(others))

    monkeypatch.setattr(RecurrentPass, name, wrong)
    assert not fuse(base).fused


def test_a_layer_of_another_kind_with_these_parts_is_left_to_its_own_code(tokenizer):
    model = build("qwen3_5_text", tokenizer)
    del model.model.layers[0].linear_attn.norm.activation
    assert mixer_of(model.model.layers[0]) is None and mixer_of(model.model.layers[2]) is not None
