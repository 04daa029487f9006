"""The C++ kernels: a linear layer, and a decoder's whole pass for families of the usual block."""

import dataclasses
import itertools
import logging

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from medusa import BaseModel
from medusa.acceptance import Verdict, accept
from medusa.acceptance.logits import Warper
from medusa.attention.contract import BlockTable
from medusa.base.usual_block import UnusualBlockError, check_decoder, embedding_scale
from medusa.cache import CachedSequence
from medusa.cpu import build, native, selection
from medusa.cpu.native import NativeLinear, available, keep_rows, use_kernels
from medusa.cpu.selection import argmax, draw, gumbel
from medusa.loading.self_test import fuse
from medusa.noise import gumbel_noise, gumbel_of, keys
from medusa.state import DecodeState
from medusa.tree import Draft, Tree
from tests.medusa.passes import prefill, verify
from tests.medusa.test_conformance import FAMILIES, FUSED, RECURRENT, tiny

pytestmark = pytest.mark.skipif(not available(), reason="there is no C++ compiler here")

BF16, F16, SINGLE = torch.bfloat16, torch.float16, torch.float32
HALVES = [pytest.param(BF16, id="bfloat16"), pytest.param(F16, id="float16")]
DTYPES = [*HALVES, pytest.param(SINGLE, id="float32")]
ACCURACY = {BF16: 2**-8, F16: 2**-11, SINGLE: 1e-5}
SHAPES = [(576, 1536), (67, 3005), (37, 100), (5, 33), (1, 7), (2048, 1024)]
BIASES = [True, False] * 3


def layer(shape, dtype, bias=False):
    torch.manual_seed(0)
    return nn.Linear(shape[1], shape[0], bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "bias"), list(zip(SHAPES, BIASES, strict=True)), ids=str)
def test_a_linear_layer_is_computed(shape, bias, dtype):
    plain = layer(shape, dtype, bias)
    for rows in [(), (1,), (2, 3), (29,), (200,)]:
        x = torch.randn(*rows, shape[1]).to(dtype)
        ours, theirs = NativeLinear(plain)(x), nn.functional.linear(x.double(), plain.weight.double())
        theirs = theirs + (plain.bias.double() if bias else 0)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, atol=ACCURACY[dtype] * float(theirs.abs().max()), rtol=0)


def test_what_float16_cannot_hold_is_infinite_and_what_it_can_is_not():
    plain = layer((2, 3), F16)
    plain.weight.copy_(torch.tensor([[1.0, 1, 1], [1, 1, -1]]))
    x = torch.tensor([[60000.0, 60000, 0], [60000, 60000, 60000], [6e-8, 0, 0]]).to(F16)
    infinite = torch.tensor([[torch.inf, torch.inf], [torch.inf, 60000], [6e-8, 6e-8]]).to(F16)
    assert torch.equal(NativeLinear(plain)(x), infinite), "sums are in float32"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_how_many_there_are(shape, dtype):
    """Terms cancel: what is left shows the order of the sums even in bfloat16."""
    plain, half = layer(shape, dtype), shape[1] // 2
    part, x = plain.weight[:, :half], torch.randn(200, half).to(dtype)
    odd = torch.zeros(len(part), shape[1] - 2 * half, dtype=dtype), torch.zeros(200, shape[1] - 2 * half, dtype=dtype)
    plain.weight.data = torch.cat([part, part.flip(1), odd[0]], 1)
    x = torch.cat([x, -x.flip(1), odd[1]], 1)
    ours = NativeLinear(plain)
    expected = ours(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 24, 25, 129):
        assert torch.equal(ours(x[:rows]), expected[:rows])
        assert torch.equal(ours(x[-rows:]), expected[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
    ours, x, before = NativeLinear(layer((301, 64), dtype)), torch.randn(9, 64).to(dtype), torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(ours(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def drawn(logits, warper, seed=7):
    """By the kernel, and as the reference draws."""
    seeds, positions = torch.tensor([seed]), torch.arange(logits.shape[1])[None]
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    return draw(logits, keys(seeds, positions), *warper), (warper(logits) + noise).argmax(-1)


@pytest.mark.parametrize("columns", [5, 37, 1000, 49152])
def test_tokens_are_those_that_filters_and_noise_choose(columns):
    logits = torch.randn(1, 8, columns, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 1, 1:] = -torch.inf
    filters = list(itertools.product((0.2, 0.8, 1.5), (0, 1, 5), (1, 0.9, 0.05), (0, 0.1)))
    for warper in itertools.starmap(Warper, filters[:: 1 if columns <= 1000 else 5]):
        ours, reference = drawn(logits, warper)
        assert torch.equal(ours, reference), warper


@pytest.mark.parametrize("dtype", HALVES)
def test_tokens_of_half_logits_are_drawn_and_equal_ones_stay_together(dtype):
    logits = (torch.randn(1, 64, 997, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    for warper in (Warper(0.8), Warper(1.0, 20), Warper(1.0, 0, 0.9), Warper(1.0, 50, 0.5, 0.01)):
        ours, reference = drawn(logits, warper)
        assert torch.equal(ours, reference), warper
    same = torch.zeros(1, 400, 3)
    same[..., 2] = -1
    assert set(drawn(same, Warper(1.0, 1))[0].flatten().tolist()) == {0, 1}


def test_what_cannot_be_drawn_is_a_token_all_the_same():
    for value in (torch.nan, torch.inf, -torch.inf):
        row = torch.full((1, 1, 100), -1.0)
        row[0, 0, 40:42] = value
        assert drawn(row if value > 0 or value != value else torch.full_like(row, value), Warper(0.5, 3, 0.5))[0] <= 41


def test_noise_for_drafts_is_nearly_that_of_draws():
    tokens, keyed = torch.arange(0, 300_000, 3), keys(torch.tensor([5, 6]), torch.tensor([[9], [10]]))[:, 0]
    torch.testing.assert_close(gumbel(keyed, tokens), gumbel_of(keyed[:, None], tokens), atol=2e-6, rtol=2e-6)


def test_keys_are_those_of_torch():
    seeds = torch.tensor([0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x9E3779B9])
    positions = torch.arange(7 * 9).view(7, 9) * 1_000_003 + 1
    assert torch.equal(selection.keys(seeds, positions), keys(seeds, positions))


@pytest.mark.parametrize("says", ["edges", "likelihood", "bonus"])
@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_accepted_is_that_of_the_reference(monkeypatch, says, ragged):
    generator = torch.Generator().manual_seed(0)

    def numbers(most, *shape):
        return torch.randint(most, shape, generator=generator)

    for nodes in (1, 2, 5, 9, 33):
        parents = torch.stack([numbers(max(n, 1), 40) for n in range(nodes)], dim=1)
        tokens, bonus = numbers(3, 40, nodes), numbers(3, 40, nodes)
        edges = None if says == "bonus" else numbers(10, 40, nodes) < 6
        likely = torch.rand(40, nodes, generator=generator).log() if says == "likelihood" else None
        sizes = (nodes, *(1 + numbers(nodes, 39)).tolist()) if ragged else None
        hidden = torch.randn(40, nodes, 7, generator=generator).to(BF16)
        history, positions, active = numbers(9, 40, 60), numbers(20, 40), numbers(2, 40) > 0
        found = []
        for here in (True, False):
            monkeypatch.setattr(native, "reads_indices", lambda *_, here=here: here)
            draft = dataclasses.replace(Draft.of(tokens, parents, nodes), sizes=sizes)
            state = DecodeState(tokens[:, 0], hidden[:, 0], active, history.clone(), positions, positions, positions)
            accepted = accept(draft, Verdict(edges, bonus, likely), state, hidden)
            found.append((draft.depths, accepted, state.history))
        (our_depths, ours, our_text), (depths, reference, text) = found
        assert torch.equal(our_depths, depths)
        assert all(torch.equal(getattr(ours, x), getattr(reference, x)) for x in ("path", "counts", "bonus", "hidden"))
        for row, count in enumerate(ours.counts.tolist()):
            assert bool(count) == bool(active[row])
            assert torch.equal(ours.tokens[row, :count], reference.tokens[row, :count])
            end = positions[row] + count + 1
            assert torch.equal(our_text[row, :end], text[row, :end])


def test_rows_that_do_not_fit_are_refused():
    ours = NativeLinear(layer((4, 8), BF16))
    for x in (torch.randn(2, 8), torch.randn(2, 8).to(F16), torch.randn(2, 7).to(BF16)):
        with pytest.raises(RuntimeError, match="do not fit"):
            ours(x)


class Scaled(nn.Linear):
    """Computes something else than its weight says, as quantised layers do."""

    def forward(self, x):
        return 2 * super().forward(x)


class Quantised(torch.Tensor):
    """A weight that says how it is multiplied, as torchao's do."""


def test_what_is_not_plain_is_left_alone():
    layers = nn.Sequential(Scaled(128, 256), nn.Linear(256, 128), nn.Linear(8, 8).double(), nn.Linear(8, 8))
    layers[1].weight = nn.Parameter(layers[1].weight.detach().as_subclass(Quantised))
    assert use_kernels(layers) == 1
    assert isinstance(layers[3], NativeLinear)


def rows_of(base, lengths=(40, 3)):
    """Hidden states of a prompt each, and of a tree behind it, with the cached keys of the last layer."""
    torch.manual_seed(1)
    tree, pool, device = Tree.full([2, 2]), base.new_pool(), base.device
    sequences = [CachedSequence(pool) for _ in lengths]
    prompts = torch.randint(3, base.vocab_size, (len(lengths), max(lengths))).to(device)
    prompt_rows = verify(base, sequences, Draft.chain(prompts))
    for one, length in zip(sequences, lengths, strict=True):
        one.length = length
    tokens = torch.randint(3, base.vocab_size, (len(lengths), tree.nodes)).to(device)
    tree_rows = verify(base, sequences, Draft.of(tokens, tree.parents.to(device).expand_as(tokens), tree.depth))
    keys, cached = next(arena.keys for arena in pool.arenas[::-1] if arena.keys is not None).flatten(0, 1), []
    for one, length in zip(sequences, lengths, strict=True):
        table = BlockTable(pool.tables.of([one.line]), pool.size)
        rows = keys[table.places(torch.arange(length + tree.nodes, device=device)[None])[0]]
        cached.append(rows.sort(-1).values)  # queries and keys may be stored in another order than the family's
    return [prompt_rows[b, :length] for b, length in enumerate(lengths)], tree_rows, cached


@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_a_fused_pass_computes_what_the_family_computes(family):
    base, _ = tiny(family, "exact")
    base = base.tapped((3, 1))
    close = (
        1e-3 if family in RECURRENT else 2e-4
    )  # short keys are divided by their length, which enlarges rounding errors
    torch.testing.assert_close(rows_of(base.with_fused_pass()), rows_of(base), atol=close, rtol=close)


@pytest.mark.parametrize(("family", "dtype"), list(zip(FUSED, [BF16, F16] * len(FUSED), strict=False)), ids=str)
@torch.inference_mode()
def test_it_rounds_where_the_family_rounds(family, dtype):
    """As near to the family's own pass in 16 bits as that one is to its pass in float32."""
    base, _ = tiny(family, "exact")
    exact = rows_of(base)[1]
    base = BaseModel(base.model.to(dtype), None, family, "exact")
    theirs, ours = rows_of(base)[1].float(), rows_of(base.with_fused_pass())[1].float()
    assert (ours - theirs).norm() < (theirs - exact).norm()


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "gemma4_text-26b"])
@torch.inference_mode()
def test_many_rows_pass_in_slabs(family):
    base, _ = tiny(family, "exact")
    base.context_length = 1000
    ours, theirs = (rows_of(each, (300, 290)) for each in (base.with_fused_pass(), base))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma4_text", "gemma4_text-26b"])
@torch.inference_mode()
def test_what_fills_up_smaller_trees_is_not_computed(family):
    """Trees of several sizes beside each other, and each of them alone: the same bits."""
    base, _ = tiny(family, "exact")
    base = base.with_fused_pass()
    prompts, tree = [list(range(3, 40)), [5], [8, 9, 10]], Tree.full([2, 2])
    whole = Draft.of(torch.arange(21).view(3, 7) % 50 + 3, tree.parents.expand(3, -1), tree.depth)
    sizes = (7, 1, 4)
    ragged = whole.keeping(torch.arange(7) < torch.tensor(sizes)[:, None])

    def hidden(rows, draft):
        sequences, state = prefill(base, [prompts[row] for row in rows])
        assert torch.equal(state.roots, torch.tensor([prompts[row][-1] for row in rows]))
        return verify(base, sequences, draft)

    together = hidden(range(3), ragged)
    for row, size in enumerate(sizes):
        alone = hidden([row], Draft.of(whole.tokens[row : row + 1, :size], whole.parents[row : row + 1, :size], 2))
        assert torch.equal(together[row, :size], alone[0])
        assert not together[row, size:].any()


def test_sizes_that_fill_no_vector(monkeypatch):
    odd = {"hidden_size": 36, "intermediate_size": 50, "head_dim": 6, "num_attention_heads": 6, "num_hidden_layers": 3}
    monkeypatch.setitem(FAMILIES, "qwen3", odd)
    base, _ = tiny("qwen3", "exact")
    torch.testing.assert_close(rows_of(base.with_fused_pass()), rows_of(base), atol=2e-4, rtol=2e-4)


def test_other_blocks_than_the_usual_one_are_left_to_transformers(caplog):
    with caplog.at_level(logging.INFO, logger="medusa"):
        assert not any(fuse(tiny(family, "exact")[0]).fused for family in ("gpt2", "arcee"))
    assert "base (gpt2) runs as transformers does: the decoder (GPT2Model) has h, ln_f, wpe, wte" in caplog.text


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma4_text-31b", "its attention norms values, or its layers scale their outputs"),
        ("gemma4_text-26b", r"a layer \(Gemma4TextDecoderLayer\) has experts, "),
    ],
)
def test_what_only_the_kernels_of_a_cpu_know_is_refused_elsewhere(family, reason):
    decoder = tiny(family)[0].decoder
    check_decoder(decoder, on_cpu=True)
    with pytest.raises(UnusualBlockError, match=reason):
        check_decoder(decoder)


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "neighbours"])
def test_a_fault_as_small_as_rounding_in_many_layers_is_found(turned, monkeypatch, caplog):
    """Positions of random weights matter little: a pass that turns the wrong numbers changes logits by .1."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "initializer_range": 0.035,
    }
    config = AutoConfig.for_model("llama", **shape, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config).to(BF16).eval()
    base = BaseModel(model, None, "llama", "exact")
    if turned:
        monkeypatch.setattr("medusa.cpu.fused.turns_pairs", lambda *_: True)
    assert fuse(base).fused != turned
    assert ("since in our kernels its logits differ from plain text by 0." in caplog.text) == turned


def test_positions_that_turn_heads_in_another_way_are_refused(monkeypatch):
    base, _ = tiny("llama", "exact")
    name = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
    monkeypatch.setattr(name, lambda q, k, *_: (q, k))
    with pytest.raises(UnusualBlockError, match="its positions turn heads in another way"):
        base.with_fused_pass()
    monkeypatch.setattr(name, lambda q, k, cos, sin, positions: (q, k))
    with pytest.raises(UnusualBlockError, match=r"its positions cannot be tried: .*positions"):
        base.with_fused_pass()


def test_layers_that_a_kernel_does_not_know_are_refused():
    base, _ = tiny("llama", "exact")
    base.model.model.layers[1].mlp.extra = nn.Linear(4, 4)
    with pytest.raises(UnusualBlockError, match=r"its MLP \(LlamaMLP\) has extra"):
        base.with_fused_pass()
    base, _ = tiny("llama", "exact")
    base.model.model.layers[2].mlp.up_proj = Scaled(32, 48)
    with pytest.raises(UnusualBlockError, match="a linear layer is Scaled"):
        base.with_fused_pass()


def test_without_a_compiler_bases_run_as_transformers_does(monkeypatch, caplog):
    def missing():
        raise build.NativeUnavailableError("no C++ compiler")

    base, _ = tiny("llama", "exact")
    available.cache_clear()
    monkeypatch.setattr("medusa.cpu.native.kernels", missing)
    try:
        assert use_kernels(nn.Sequential(nn.Linear(8, 8))) == 0
        for one in (tiny("llama")[0], base):
            assert not fuse(one).fused
    finally:
        available.cache_clear()
    assert "no C++ kernels on this CPU, decoding is slower: no C++ compiler" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 16, 100, 4099])
def test_the_first_of_the_largest_is_found(columns, dtype):
    torch.manual_seed(0)
    x = (4 * torch.randn(5, 3, columns)).to(dtype)
    assert torch.equal(argmax(x), x.argmax(-1))
    x[0], x[1] = 2.0, float("-inf")
    x[2, 0, columns // 2 :], x[2, 1, columns // 3] = float("inf"), float("-inf")
    x[3, 0, columns // 2 :], x[3, 1, -1] = float("nan"), float("nan")
    assert torch.equal(argmax(x), x.argmax(-1))


def test_accepted_paths_move_to_the_end_of_their_text():
    torch.manual_seed(0)
    blocks, size = torch.tensor([[2, 0], [1, 4], [3, 5]]), 5
    buffers = [torch.randn(6, size, 2, width).to(dtype) for width in (4, 7) for dtype in (BF16, SINGLE)]
    before = [buffer.clone().flatten(0, 1) for buffer in buffers]
    lengths, counts = torch.tensor([2, 3, 8]), torch.tensor([3, 4, 0])
    path = torch.tensor([[0, 2, 5, 3], [0, 1, 3, 6], [0, 1, 2, 3]])

    def place(slot, position):
        return int(blocks[slot, position // size]) * size + position % size

    moved = {
        place(slot, int(lengths[slot]) + at): place(slot, int(lengths[slot] + path[slot, at]))
        for slot in range(3)
        for at in range(counts[slot])
    }
    keep_rows(buffers, path, counts, lengths, blocks, size)
    for buffer, rows in zip(buffers, before, strict=True):
        expected = rows.clone()
        expected[list(moved)] = rows[list(moved.values())]
        assert torch.equal(buffer.flatten(0, 1), expected)


def test_a_token_that_the_base_does_not_have_is_refused():
    base = tiny("llama", "exact")[0].with_fused_pass()
    for token in (-1, 50):
        with pytest.raises(IndexError, match="token id"):
            verify(base, [CachedSequence(base.new_pool())], Draft.chain(torch.tensor([[3, token]])))


def test_the_scale_of_embeddings_is_known():
    base = tiny("gemma3_text")[0]
    tokens, (embeddings, scale, *_) = torch.arange(9), base.matrices
    assert torch.equal(base.embed(tokens), embeddings[tokens] * scale) and scale != 1

    class Scaled(nn.Embedding):
        embed_scale = 2.5

    assert (embedding_scale(Scaled(3, 4)), embedding_scale(nn.Embedding(3, 4))) == (2.5, 1)
    with pytest.raises(UnusualBlockError, match="Linear"):
        embedding_scale(nn.Linear(3, 4))


def test_a_quantised_end_of_a_base_is_no_plain_matrix():
    base, _ = tiny("llama", "exact")
    assert base.matrices is not None
    base.model.lm_head.weight = nn.Parameter(base.model.lm_head.weight.detach().as_subclass(Quantised))
    assert base.matrices is None
