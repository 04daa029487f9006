"""Heads that remember: drafts are what the layer says of a text and a path, computed anew, whoever drafts beside."""

import dataclasses

import pytest
import torch

from medusa import BaseModel, HeadsConfig, MedusaModel, Prefix, SamplingParams, Speculation, build_heads
from medusa.cache import BLOCK
from medusa.cpu.native import available
from medusa.drafters import HeadsDrafter, SampledHeadsDrafter
from medusa.engine.config import EngineConfig
from medusa.formats import load_heads
from medusa.heads.layer import LayerConfig
from medusa.tree import Tree
from tests.medusa.layer_by_hand import recomputed
from tests.medusa.test_native import BF16, DTYPES, F16, SINGLE

TEXTS = [[5, 6, 7, 9, 4, 4, 8], [9, 8], [11, 3] * 40]
LAYERS = {"last": (), "one": (1,)}
NORMS = {
    "3": {"norm_features": False, "norm_output": False},
    "3.1": {},
    "others": {"norm_jointly": True, "norm_before_residual": True, "norm_heads": True, "attention_bias": True},
}


@pytest.fixture(params=[(layers, norms) for layers in LAYERS for norms in NORMS], ids=str)
def heads(request, base, make_heads):
    layers, norms = request.param
    layer = LayerConfig.of(base.config, **NORMS[norms])
    heads = make_heads(4, architecture="attention", feature_layers=LAYERS[layers], layer=layer, own_lm_heads=True)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return heads


class Watched(HeadsDrafter):
    """Keeps its drafts with the texts that they are for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def propose(self, state, sequences=(), /):
        draft = super().propose(state, sequences)
        for row, place in enumerate(state.positions.tolist()):
            if state.active[row]:
                self.seen.append((state.history[row, : place + 1].tolist(), draft, row))
        return draft


def paths(draft, row):
    """Each node's tokens from the root on, without the root."""
    found = [[]]
    for node in range(1, draft.row_sizes[row]):
        found.append([*found[draft.parents[row, node]], int(draft.tokens[row, node])])
    return found


@torch.no_grad()
def check(heads, base, draft, row, text, tolerance=1e-4):
    """Every node's score is the sum of log-probabilities along its path, each computed anew."""
    assert len(paths(draft, row)) > 1
    for path, score in zip(paths(draft, row), draft.scores[row].tolist(), strict=False):
        expected = 0.0
        for depth, token in enumerate(path):
            expected += float(recomputed(heads, base, text, path[:depth]).log_softmax(-1)[token]) - 1e-4
        assert score == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    "shape", [{"nodes": 9}, {"nodes": 1, "tree": Tree.full([2, 2, 1, 1])}], ids=["dynamic", "static"]
)
def test_every_node_is_what_the_layer_says_of_text_and_path(heads, base, shape):
    """In a batch of texts of several lengths, prompts in chunks."""
    model = MedusaModel(base, heads)
    drafter = Watched(model.heads, model.base, host_decides=False, **shape)
    batch = model.batch(config=EngineConfig(chunk=3))
    requests = [
        batch.add(text, SamplingParams(max_new_tokens=8, ignore_eos=True), Speculation(drafter)) for text in TEXTS
    ]
    while len(batch):
        batch.step()
    assert max(draft.depth for _, draft, _ in drafter.seen) == 4 and len(drafter.seen) > 9
    for text, draft, row in drafter.seen[::5]:
        check(heads, base, draft, row, text)
    plain = model.generate(TEXTS, max_new_tokens=8, ignore_eos=True, nodes=1)
    assert [request.output.tokens for request in requests] == [output.tokens for output in plain]


@pytest.mark.skipif(not available(), reason="there is no C++ compiler here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_a_pass_in_one_call_is_the_one_in_python(base_directory, make_heads, monkeypatch, norms, dtype):
    """Of prompts and of levels of trees, in a batch."""
    base = BaseModel.load(base_directory, dtype=dtype, device="cpu")
    layer = LayerConfig.of(base.config, **norms)
    heads = make_heads(4, architecture="attention", feature_layers=(1,), layer=layer, own_lm_heads=True).to(dtype)
    model = MedusaModel(base, heads)
    memory = model.heads.memory
    fused, run, compared = memory.fused, type(memory).run, []

    def both(memory, pool, plan, states):
        memory.fused = None
        theirs = run(memory, pool, plan, states)
        memory.fused = fused
        ours = run(memory, pool, plan, states)
        tolerance = {BF16: 0.1, F16: 0.01, SINGLE: 1e-4}[dtype]
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        compared.append((plan.computed, plan.rows))
        return ours

    monkeypatch.setattr(type(memory), "run", both)
    drafter = Watched(model.heads, model.base, 9, host_decides=False)
    model.generate(TEXTS, max_new_tokens=10, ignore_eos=True, drafter=drafter)
    assert (1, 3 * 4) in compared and max(rows for computed, rows in compared if not computed) > 16
    if dtype == SINGLE:
        for text, draft, row in drafter.seen[::4]:
            check(heads, base, draft, row, text, tolerance=2e-3)


def model_of(base, make_heads, **options):
    return MedusaModel(base, make_heads(4, architecture="attention", feature_layers=(1,), **options))


def test_drawn_drafts_say_what_they_were_drawn_from(base, make_heads):
    """Each node's distribution is the layer's below its parent, without what its older siblings drew."""
    model = model_of(base, make_heads, own_lm_heads=True)
    seen = []

    class Noted(SampledHeadsDrafter):
        def propose(self, state, sequences=(), /):
            draft = super().propose(state, sequences)
            seen.append((state.history[0, : int(state.positions[0]) + 1].tolist(), draft))
            return draft

    drafter = Noted(model.heads, model.base, 8, temperature=0.7)
    model.generate(TEXTS[0], max_new_tokens=6, temperature=0.7, drafter=drafter, acceptance="speculative")
    for text, draft in seen:
        below = paths(draft, 0)
        for node in range(1, draft.tokens.shape[1]):
            parent, first = (
                int(draft.parents[0, node]),
                bool((draft.parents[0, 1:node] != draft.parents[0, node]).all()),
            )
            if first:
                expected = recomputed(model.heads, base, text, below[parent]).div(0.7).softmax(-1)
                torch.testing.assert_close(draft.probs[0, node], expected, atol=1e-5, rtol=1e-4, check_dtype=False)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["heads", "hybrid", None])
def test_texts_are_the_bases_own(base, make_heads, sampling, drafter):
    model, options = model_of(base, make_heads), {"max_new_tokens": 20, "seed": [1, 2, 3], **sampling}
    plain = model.generate(TEXTS, nodes=1, **options)
    drafted = model.generate(TEXTS, drafter=drafter, **options)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]


def test_what_is_known_of_a_text_is_not_computed_again(base, make_heads, monkeypatch):
    """Neither by the base nor by the layer, whose drafts are those of an empty cache; other heads must compute it."""
    model, prefix = model_of(base, make_heads, own_lm_heads=True), Prefix()
    model = model.with_heads({"other": make_heads(3, architecture="attention")})
    computed, run = [], type(model.heads.memory).run
    monkeypatch.setattr(
        type(model.heads.memory), "run", lambda memory, pool, plan, states: computed.append(plan.rows)
        or run(memory, pool, plan, states),
    )  # fmt: skip
    text = list(range(3, 3 + 2 * BLOCK + 5))
    for heads, known in ((None, 0), (None, 2 * BLOCK), ("other", 0), ("other", 2 * BLOCK)):
        computed.clear()
        options = {"max_new_tokens": 12, "ignore_eos": True, "nodes": 6, "drafter": "heads", "heads": heads}
        output = model.generate(text, prefix=prefix, **options)
        rows = sum(computed)
        assert output.cached_tokens == known
        alone = model.generate(text, **options)
        assert (output.tokens, output.steps, output.draft_tokens) == (alone.tokens, alone.steps, alone.draft_tokens)
        assert sum(computed) - rows == rows + known


def test_requests_choose_heads_of_both_kinds(base, make_heads):
    """In one batch; who asks for no drafts is not followed."""
    kinds = {"one": make_heads(3, architecture="attention"), "two": make_heads(2, feature_layers=(1,))}
    model = model_of(base, make_heads).with_heads(kinds)
    batch, params = model.batch(), SamplingParams(max_new_tokens=14, ignore_eos=True)
    requests = [
        batch.add(TEXTS[0], params, Speculation("heads", nodes=nodes, heads=heads))
        for heads in (None, "one", "two") for nodes in (1, 5)
    ]  # fmt: skip
    batch.step()
    followed = [len(request.cached.followers) for request in requests]
    assert followed == [0, 1, 0, 1, 0, 0]
    while len(batch):
        batch.step()
    assert len({tuple(request.output.tokens) for request in requests}) == 1


def test_bases_of_chains_get_chains(base, make_heads):
    heads = make_heads(4, architecture="attention", own_lm_heads=True)
    model = MedusaModel(base.with_traits(decoding="chain"), heads)
    plain = model.generate(TEXTS, max_new_tokens=15, nodes=1)
    drafted = model.generate(TEXTS, max_new_tokens=15, nodes=4, drafter="heads")
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]


def test_they_are_saved_with_the_shape_of_their_layer(base, make_heads, tmp_path):
    heads = make_heads(4, architecture="attention", feature_layers=(1,), draft_vocab_size=30, own_lm_heads=True)
    model = MedusaModel(base, heads)
    model.save_pretrained(tmp_path)
    loaded = load_heads(tmp_path, dtype=None)
    assert loaded.config.layer == heads.config.layer
    ours, theirs = (MedusaModel(base, each).generate(TEXTS[0], max_new_tokens=12, nodes=6) for each in (heads, loaded))
    assert (ours.tokens, ours.steps) == (theirs.tokens, theirs.steps)


def test_without_a_text_they_say_what_to_do(base, make_heads):
    heads = make_heads(2, architecture="attention")
    with pytest.raises(ValueError, match="need the KV cache of a text; decode with MedusaModel or Batch"):
        MedusaModel(base, heads).heads.begin(torch.zeros(1, base.hidden_size), base)
    with pytest.raises(ValueError, match=r"layer \(None\) must be given for the architecture attention"):
        build_heads(HeadsConfig(32, 50, architecture="attention"))
    with pytest.raises(ValueError, match=r"must be a multiple of its key heads \(3\)"):
        dataclasses.replace(heads.config.layer, num_key_value_heads=3)
