"""Heads that remember: drafts are what their layers say of a text and a path, computed anew, whoever drafts beside."""

import dataclasses

import pytest
import torch

from medusa import BaseModel, HeadsConfig, MedusaModel, Prefix, SamplingParams, Speculation, build_heads
from medusa.cache import BLOCK
from medusa.cpu.native import available
from medusa.drafters import SampledHeadsDrafter
from medusa.engine.config import EngineConfig
from medusa.formats import load_heads
from medusa.heads.layer import LayerConfig
from medusa.train.fresh_heads import last_norm
from medusa.tree import Tree
from tests.medusa.passes import finish
from tests.medusa.remembering import TEXTS, Watched, recomputed, scores
from tests.medusa.test_conformance import config_of
from tests.medusa.test_native import BF16, F16, SINGLE
from tests.medusa.trees import by_path, paths

ONE = {"feature_layers": (1,)}
PART = {"draft_vocab_size": 30}
OWN = {"own_lm_heads": True}
EAGLE_31 = {}
EAGLE_3 = {"norm_features": False, "norm_output": False}
OTHERS = {"norm_jointly": True, "norm_before_residual": True, "norm_heads": True, "attention_bias": True}
QWEN = {"norm_heads": True, "attention_bias": True}
DSPARK = {"norm_heads": True, "norm_features": False, "attention_bias": True}
SHAPES = {
    "attention": (OWN, EAGLE_31),
    "attention, a layer of features": (OWN | ONE, EAGLE_31),
    "attention, a layer of features, as in EAGLE-3": (OWN | ONE, EAGLE_3),
    "attention, a layer of features, with other norms": (OWN | ONE, OTHERS),
    "attention, a window": (OWN, {"window": 6}),
    "block": (OWN, {}),
    "block, two layers with a window": (ONE | {"num_layers": 2}, {"window": 6}),
    "block behind a soft cap": (ONE, {}),
    "block, a part of the vocabulary": (ONE | PART, {}),
    "block, masked rows": (ONE | {"mask_token": 9}, {}),
    "block as in DSpark": (ONE | PART | OWN | {"num_layers": 2, "mask_token": 9, "own_correction": True}, DSPARK),
}
"""Of heads, and of their layers."""


def test_a_layer_of_a_base_whose_layers_differ_is_like_its_first():
    layer = LayerConfig.of(config_of("gemma4_text"))
    assert (layer.head_dim, layer.num_attention_heads, layer.num_key_value_heads) == (8, 4, 2)


@pytest.fixture(params=SHAPES)
def model(request, base, make_heads):
    options, layer = SHAPES[request.param]
    architecture = "block" if request.param.startswith("block") else "attention"
    heads = make_heads(4, architecture=architecture, layer=LayerConfig.of(base.config, **layer), **options)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if heads.draft_ids is not None:
        heads.draft_ids.copy_(torch.arange(30) * 3)
    model = MedusaModel(base, heads)
    if "cap" in request.param:
        model.heads._raised = None  # as where the base's output layer has one
    return model


SLOW = pytest.mark.slow


@pytest.fixture(
    params=[
        "attention", "block, a window", pytest.param("block", marks=SLOW),
        pytest.param("attention, a window", marks=SLOW),
    ]
)  # fmt: skip
def make(request, base, make_heads):
    """Makes heads of each kind."""
    kind, _, window = request.param.partition(", ")
    layer = LayerConfig.of(base.config, window=6 if window else None)
    return lambda num_heads=4, **options: make_heads(num_heads, architecture=kind, layer=layer, **options)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        *((name, {"nodes": 9}) for name in SHAPES),
        ("attention, a window", {"nodes": 1, "tree": Tree.full([2, 2, 1, 1])}),
    ],
    indirect=["model"], ids=lambda value: value if isinstance(value, str) else "static" if "tree" in value else "",
)  # fmt: skip
def test_every_node_is_what_the_layers_say_of_text_and_path(model, base, shape):
    """In a batch of texts of several lengths, prompts in chunks: a score sums log-probabilities along the path."""
    drafter = Watched(model.heads, model.base, host_decides=False, **shape)
    batch, params = model.batch(config=EngineConfig(chunk=5)), SamplingParams(max_new_tokens=8, ignore_eos=True)
    requests = [batch.add(text, params, Speculation(drafter)) for text in TEXTS]
    finish(batch)
    assert max(draft.depth for _, draft, _ in drafter.seen) == 4 and len(drafter.seen) > 9
    for text, draft, row in drafter.seen[::8]:
        found = by_path(draft, row)
        assert len(found) == draft.row_sizes[row] > 1
        assert found == pytest.approx(scores(model.heads, base, text, found), abs=1e-4)
    plain = model.generate(TEXTS, max_new_tokens=8, ignore_eos=True, nodes=1)
    assert [request.output.tokens for request in requests] == [output.tokens for output in plain]


def test_drawn_drafts_say_what_they_were_drawn_from(base, make):
    """Each node's distribution is that below its parent, without what its older siblings drew."""
    model = MedusaModel(base, make(**ONE, **OWN))
    seen = []

    class Noted(SampledHeadsDrafter):
        def propose(self, state, sequences=(), /):
            draft = super().propose(state, sequences)
            seen.append((state.history[0, : int(state.positions[0]) + 1].tolist(), draft))
            return draft

    drafter = Noted(model.heads, model.base, 8, temperature=0.7)
    model.generate(TEXTS[0], max_new_tokens=6, temperature=0.7, drafter=drafter, acceptance="speculative")
    compared = 0
    for text, draft in seen:
        below, parents = paths(draft, 0), draft.parents[0].tolist()
        for node in range(1, len(parents)):
            if parents[node] not in parents[1:node]:
                expected = recomputed(model.heads, base, text, below[parents[node]]).div(0.7).softmax(-1)
                torch.testing.assert_close(draft.probs[0, node], expected, atol=1e-5, rtol=1e-4, check_dtype=False)
                compared += 1
    assert compared > 6


@pytest.mark.parametrize(
    ("drafter", "sampling"), [("heads", {"temperature": 0.9, "top_p": 0.9}), (None, {})], ids=["sampled", "greedy"]
)
def test_texts_are_the_bases_own(base, make, sampling, drafter):
    model, options = MedusaModel(base, make(**ONE)), {"max_new_tokens": 20, "seed": [1, 2, 3], **sampling}
    plain = model.generate(TEXTS, nodes=1, **options)
    drafted = model.generate(TEXTS, drafter=drafter, **options)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]


def test_what_is_known_of_a_text_is_not_computed_again(base, make, monkeypatch):
    """Neither by the base nor by the layers, whose drafts are those of an empty cache; other heads must compute it."""
    model, prefix = MedusaModel(base, make(**ONE, **OWN)).with_heads({"other": make(3)}), Prefix()
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


@pytest.mark.parametrize("architecture", ["attention", "block"])
def test_a_window_that_covers_the_text_changes_no_bit(base, make_heads, architecture):
    drafts = []
    for window in (None, 60, 6):
        layer = LayerConfig.of(base.config, window=window)
        model = MedusaModel(base, make_heads(4, architecture=architecture, layer=layer, **ONE, **OWN))
        drafter = Watched(model.heads, model.base, 9, host_decides=False)
        model.generate(TEXTS[2], max_new_tokens=10, ignore_eos=True, drafter=drafter)
        drafts.append(drafter.seen[0][1])
    assert len(TEXTS[2]) - 6 > 2 * BLOCK and drafts[0].scores is not None
    assert torch.equal(drafts[1].tokens, drafts[0].tokens) and torch.equal(drafts[1].scores, drafts[0].scores)
    assert not torch.equal(drafts[2].scores, drafts[0].scores)


def test_requests_choose_heads_of_all_kinds(base, make, make_heads):
    """In one batch; who asks for no drafts is not followed."""
    kinds = {"attention": make_heads(3, architecture="attention"), "recurrent": make_heads(2, **ONE)}
    model = MedusaModel(base, make(**ONE)).with_heads(kinds)
    batch, params = model.batch(), SamplingParams(max_new_tokens=14, ignore_eos=True)
    requests = [
        batch.add(TEXTS[0], params, Speculation("heads", nodes=nodes, heads=heads))
        for heads in (None, *kinds) for nodes in (1, 5)
    ]  # fmt: skip
    batch.step()
    assert [len(request.cached.followers) for request in requests] == [0, 1, 0, 1, 0, 0]
    finish(batch)
    assert len({tuple(request.output.tokens) for request in requests}) == 1


def test_bases_of_chains_get_chains(base, make):
    model = MedusaModel(base.with_traits(decoding="chain"), make(**OWN))
    plain = model.generate(TEXTS, max_new_tokens=15, nodes=1)
    drafted = model.generate(TEXTS, max_new_tokens=15, nodes=4, drafter="heads")
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]


@pytest.mark.parametrize("name", ["attention", "block"])
def test_they_are_saved_with_the_shape_of_their_layers(base, make_heads, tmp_path, name):
    options = {"attention": OWN, "block": {"num_layers": 2, "rank": 3}}[name]
    heads = make_heads(4, architecture=name, **ONE, **PART, **options)
    MedusaModel(base, heads).save_pretrained(tmp_path)
    loaded = load_heads(tmp_path, dtype=None)
    for field in ("layer", "num_layers", "rank"):
        assert getattr(loaded.config, field) == getattr(heads.config, field)
    ours, theirs = (MedusaModel(base, each).generate(TEXTS[0], max_new_tokens=12, nodes=6) for each in (heads, loaded))
    assert (ours.tokens, ours.steps) == (theirs.tokens, theirs.steps)


def test_without_a_text_they_say_what_to_do(base, make):
    heads = make()
    with pytest.raises(ValueError, match="need the KV cache of a text; decode with MedusaModel or Batch"):
        MedusaModel(base, heads).heads.begin(torch.zeros(1, base.hidden_size), base)
    architecture = heads.config.architecture
    with pytest.raises(ValueError, match=rf"layer \(None\) must be given for the architecture {architecture}"):
        build_heads(HeadsConfig(32, 50, architecture=architecture))
    with pytest.raises(ValueError, match=r"must be a multiple of its key heads \(3\)"):
        dataclasses.replace(heads.config.layer, num_key_value_heads=3)


def other_norms(heads):
    """The same with norms of queries and keys that are far from 1."""
    for name, weight in heads.named_parameters():
        if "query_norm" in name or "key_norm" in name:
            weight.data.uniform_(0.5, 1.5)
    return heads


@pytest.mark.skipif(not available(), reason="there is no C++ compiler here")
@pytest.mark.parametrize(
    ("dtype", "norms"),
    [
        (SINGLE, EAGLE_3), (SINGLE, EAGLE_31), (SINGLE, QWEN), (SINGLE, {"window": 17}),
        (BF16, EAGLE_31), (BF16, QWEN), (F16, EAGLE_3), (F16, {"window": 17}),
    ],
)  # fmt: skip
def test_attention_in_one_call_is_that_in_python(base_directory, make_heads, monkeypatch, norms, dtype):
    """Of prompts and of levels of trees, in a batch."""
    base = BaseModel.load(base_directory, dtype=dtype, device="cpu")
    layer = LayerConfig.of(base.config, **norms)
    heads = other_norms(make_heads(4, architecture="attention", layer=layer, **ONE, **OWN)).to(dtype)
    model = MedusaModel(base, heads)
    memory = model.heads.memory
    assert memory.fused is not None
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
            found = by_path(draft, row)
            assert found == pytest.approx(scores(heads, base, text, found), abs=2e-3)


@pytest.mark.skipif(not available(), reason="there is no C++ compiler here")
@pytest.mark.parametrize(
    ("dtype", "layers", "shape"),
    [(SINGLE, 1, {}), (SINGLE, 2, {}), (SINGLE, 2, DSPARK), (BF16, 2, {}), (BF16, 2, DSPARK), (F16, 1, {})],
)
def test_blocks_in_one_call_are_those_in_python(base_directory, make_heads, layers, shape, dtype):
    """Over texts, prompts among them, and over blocks, in a batch: the same scores of the same paths."""
    base = BaseModel.load(base_directory, dtype=dtype, device="cpu")
    layer = LayerConfig.of(base.config, **shape)
    heads = other_norms(make_heads(4, architecture="block", feature_layers=(1,), num_layers=layers, layer=layer))
    heads = heads.to(dtype)
    model, seen = MedusaModel(base, heads), []
    assert model.heads.memory.fused is not None
    for _ in range(2):
        drafter = Watched(model.heads, model.base, 9)
        model.generate(TEXTS, max_new_tokens=10, ignore_eos=True, drafter=drafter)
        seen.append({tuple(text): by_path(draft, row) for text, draft, row in drafter.seen})
        model.heads.memory.fused = None
    compared = 0
    for text in seen[0].keys() & seen[1].keys():
        for path in seen[0][text].keys() & seen[1][text].keys():
            tolerance = {BF16: 0.3, F16: 0.04, SINGLE: 1e-3}[dtype]
            assert seen[0][text][path] == pytest.approx(seen[1][text][path], abs=tolerance)
            compared += 1
    assert compared > 30
    for text, found in list(seen[0].items())[:: 4 if dtype == SINGLE else len(seen[0])]:
        assert found == pytest.approx(scores(model.heads, base, text, found), abs=2e-3 if dtype == SINGLE else 0.5)


def test_blocks_read_the_output_layer_once(base, make_heads, monkeypatch):
    """All levels come from one product with it and one pass of the layers."""
    model = MedusaModel(base, make_heads(4, architecture="block", **ONE))
    read, drafted = [], []
    joined, draft = model.heads.head_logits, model.heads.memory.draft
    monkeypatch.setattr(model.heads, "head_logits", lambda *arguments: read.append(1) or joined(*arguments))
    monkeypatch.setattr(model.heads.memory, "draft", lambda *arguments: drafted.append(1) or draft(*arguments))
    drafter = Watched(model.heads, model.base, 9, host_decides=False)
    model.generate(TEXTS[0], max_new_tokens=8, ignore_eos=True, drafter=drafter)
    assert len(read) == len(drafted) == len(drafter.seen)
    assert all(draft.depth == 4 for _, draft, _ in drafter.seen)


@pytest.mark.parametrize("architecture", ["attention", "block"])
@torch.inference_mode()
def test_fresh_heads_that_read_the_last_layer_predict_what_the_base_predicts(base, architecture):
    layers, layer = (1, base.num_layers), LayerConfig.of(base.config)
    config = HeadsConfig(32, base.vocab_size, 3, architecture=architecture, feature_layers=layers, layer=layer)
    heads = build_heads(config).to(base.dtype)
    heads.init_from_base(base.lm_head_weight, last_norm(base))
    hidden = base.tapped(layers).hidden_states(torch.tensor([TEXTS[0]]))[0]
    for features in heads(hidden, torch.randint(1, 90, (len(hidden), 3)), base):
        torch.testing.assert_close(features, hidden[:, : base.hidden_size], atol=1e-5, rtol=1e-5)


def test_fresh_blocks_say_what_the_state_names(base):
    """And layers are different layers."""
    sizes = []
    for layers in (1, 2, 3):
        layer = LayerConfig.of(base.config)
        config = HeadsConfig(32, base.vocab_size, 3, architecture="block", num_layers=layers, layer=layer)
        heads = build_heads(config).to(base.dtype)
        heads.init_from_base(base.lm_head_weight, last_norm(base))
        hidden, path = torch.randn(5, 32, dtype=base.dtype), torch.randint(1, 90, (5, 3))
        for features in heads(hidden, path, base):
            expected = torch.nn.functional.rms_norm(hidden, (32,), eps=layer.rms_norm_eps) * heads.gain
            torch.testing.assert_close(features, expected)
        sizes.append(sum(parameter.numel() for parameter in heads.parameters()))
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64
