"""Steps as graphs write what eager steps write; tests/medusa/tape.py stands in for the GPU."""

import gc
import logging
import weakref
from itertools import cycle, islice, zip_longest
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa import BaseModel, MedusaModel, Prefix, SamplingParams, Speculation
from medusa.attention import TreePlan
from medusa.attention.contract import BlockTable
from medusa.cache import BLOCK, CachedSequence, FixedTexts
from medusa.cache.follower import Followed
from medusa.cache.layer import PassLayer
from medusa.drafters import HeadsDrafter, HybridDrafter, PlainDrafter, PromptLookupDrafter, SampledHeadsDrafter
from medusa.engine.graph import StepGraphs
from medusa.engine.step import verify
from medusa.heads.frozen import freeze
from medusa.heads.layer import LayerConfig
from medusa.state import DecodeState
from tests.medusa.kinds import MEMORYLESS, REMEMBER
from tests.medusa.known_text import Chain
from tests.medusa.passes import finish
from tests.medusa.rules import make_rule
from tests.medusa.tape import Recorder, Strict, Tape
from tests.medusa.test_conformance import tiny
from tests.medusa.trees import LOPSIDED

PROMPTS = [[5, 6, 7, 5, 6, 8, 5], [40], [9, 9, 9]]
FREE = {"temperature": 1.0, "seed": 2}
SETTINGS = {
    "greedy": {"repetition_penalty": 1.1},
    "sampling": FREE | {"top_p": 0.95, "min_p": 0.01, "logit_bias": {7: 2.0}},
    "speculative": FREE | {"acceptance": "speculative", "top_k": 50},
    "typical": FREE | {"acceptance": "typical"},
}


def heads_drafter(heads, base, nodes):
    return HeadsDrafter(heads, base, nodes, host_decides=False)


def lookup(nodes):
    return PromptLookupDrafter(nodes, host_decides=False)


DRAFTERS = {
    "plain": lambda heads, base: PlainDrafter(),
    "dynamic": lambda heads, base: heads_drafter(heads, base, 12),
    "static": lambda heads, base: HeadsDrafter(heads, base, 1, LOPSIDED),
    "lookup": lambda heads, base: lookup(5),
    "hybrid": lambda heads, base: HybridDrafter([lookup(4)], [heads_drafter(heads, base, 8)], 8),
    "sampled": lambda heads, base: SampledHeadsDrafter(heads, base, 9, 1.0),
    "sampled hybrid": lambda heads, base: HybridDrafter([lookup(4)], [SampledHeadsDrafter(heads, base, 7, 1.0)], 8),
}


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """Tapes keep copies of all that they write."""
    monkeypatch.setattr("medusa.cache.pool.RESERVED", 2048)


def graphed(base, heads, record=None):
    """A model that records tapes."""
    recorder = record or Recorder()
    model = MedusaModel(base, heads, StepGraphs(base, recorder))
    model.recorder = recorder
    return model


@pytest.fixture(scope="module")
def eager(base, make_heads):
    return MedusaModel(base, make_heads())


@pytest.fixture(scope="module")
def long_lived(base, eager):
    """One model whose caches and tapes serve all tests of a kind."""
    return graphed(base, eager.heads)


@pytest.fixture
def fresh(base, eager):
    return graphed(base, eager.heads)


def contents(outputs):
    return [(o.tokens, o.drafted, o.text, o.steps, o.finish_reason) for o in outputs]


@pytest.mark.parametrize(("name", "settings"), list(zip(DRAFTERS, islice(cycle(SETTINGS), 1, None), strict=False)))
def test_a_recorded_step_is_the_eager_step(eager, long_lived, name, settings):
    options = {"max_new_tokens": 8, "drafter": DRAFTERS[name](eager.heads, eager.base)} | SETTINGS[settings]
    recorded, replays = long_lived.recorder.recorded, long_lived.recorder.replays
    outputs = long_lived.generate(PROMPTS, **options)
    assert contents(outputs) == contents(eager.generate(PROMPTS, **options))
    steps = max(output.steps for output in outputs)
    assert long_lived.recorder.recorded == recorded + 1
    assert long_lived.recorder.replays - replays >= steps - 2, "the prompt's is none, and the next one is eager"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("dynamic", {"architecture": architecture}) for architecture in MEMORYLESS),
        ("dynamic", {"draft_vocab_size": 60}),
        ("sampled", {"feature_layers": (1,)}),
        ("dynamic", {"architecture": "block", "own_lm_heads": True, "mask_token": 9, "own_correction": True}),
        *(pytest.param("sampled", {"architecture": architecture}, marks=pytest.mark.slow) for architecture in REMEMBER),
    ],
    ids=str,
)
def test_drafts_of_all_heads_can_be_recorded(base, make_heads, name, options):
    model, settings = graphed(base, make_heads(**options)), {"max_new_tokens": 8} | SETTINGS["speculative"]
    settings["drafter"] = DRAFTERS[name](model.heads, base)
    assert contents(model.generate(PROMPTS, **settings)) == contents(
        MedusaModel(base, model.heads).generate(PROMPTS, **settings)
    )
    assert model.recorder.recorded == 1


@pytest.mark.parametrize(
    ("architecture", "name", "window"),
    [
        ("attention", "dynamic", 6),
        ("block", "static", None),
        pytest.param("attention", "sampled hybrid", None, marks=pytest.mark.slow),
        pytest.param("block", "sampled hybrid", 6, marks=pytest.mark.slow),
    ],
)
def test_heads_that_remember_draft_what_they_draft_eagerly(base, make_heads, monkeypatch, architecture, name, window):
    """When others join and leave, in buckets and caches that grow, behind texts that are known."""
    monkeypatch.setattr("medusa.engine.graph.SHORTEST", 16)
    monkeypatch.setattr("medusa.cache.pool.RESERVED", 2 * BLOCK)
    layer = LayerConfig.of(base.config, window=window)
    heads = make_heads(4, architecture=architecture, feature_layers=(1,), own_lm_heads=True, layer=layer)
    model, eager = graphed(base, heads), MedusaModel(base, heads)
    drafter, heat = DRAFTERS[name](model.heads, model.base), 1.0 if "sampled" in name else 0.0
    params = [SamplingParams(max_new_tokens=most, temperature=heat, ignore_eos=True, seed=3) for most in (28, 6, 14)]
    batch, wanted, requests = model.batch(), Speculation(drafter), []
    for prompt, one in zip(PROMPTS, params, strict=True):
        requests.append(batch.add(prompt, one, wanted))
        batch.step()
        batch.step()
    finish(batch)
    for prompt, one, request in zip(PROMPTS, params, requests, strict=True):
        assert contents([request.output]) == contents([eager.generate(prompt, sampling=one, speculation=wanted)])
    assert model.recorder.recorded > 1 and model.recorder.replays > 15
    prefix, prompt = Prefix(), PROMPTS[0] * 6
    options = {"drafter": drafter, "max_new_tokens": 8, "temperature": heat, "seed": 3}
    for turn in range(2):
        output = model.generate(prompt, prefix=prefix, **options)
        assert contents([output]) == contents([eager.generate(prompt, **options)])
        assert (output.cached_tokens > 0) == (turn > 0)
        prompt = [*prompt, *output.tokens, 3, 4 + turn]


@pytest.mark.parametrize(("name", "settings"), list(zip(DRAFTERS, cycle(SETTINGS), strict=False)))
def test_the_step_on_the_device_never_asks_the_host(make_heads, base, name, settings):
    """On the meta device there are no values, and the mode refuses copies that a graph cannot hold."""
    config = {key: value for key, value in SETTINGS[settings].items() if key not in ("seed", "acceptance")}
    meta, heads = on_meta(base), make_heads().float().to("meta")
    drafter, rule = DRAFTERS[name](heads, meta), make_rule(SETTINGS[settings].get("acceptance"), "meta", **config)
    pool = meta.new_pool(4 * BLOCK)
    with torch.inference_mode():
        state, table = meta_state(meta)
        with Strict():
            plan = TreePlan([drafter.propose(state)], state.positions, 64, table, meta.attention, meta.spans)
            accepted, _, after = verify(meta, pool, plan, rule, state)
    assert accepted.emitted.shape[1] == 2
    assert (after.roots.shape, after.hidden.shape) == (state.roots.shape, state.hidden.shape)


@pytest.mark.parametrize(("architecture", "window"), [("attention", 6), ("block", None)])
def test_nor_do_layers_that_follow(make_heads, base, architecture, window):
    meta, layer = on_meta(base), LayerConfig.of(base.config, window=window)
    heads = freeze(make_heads(4, architecture=architecture, layer=layer).to("meta", meta.dtype), meta)
    drafter, pool, own = heads_drafter(heads, meta, 12), meta.new_pool(4 * BLOCK), heads.memory.new_pool()
    with torch.inference_mode():
        state, table = meta_state(meta)
        latest = torch.zeros(2, meta.hidden_size, device="meta", dtype=meta.dtype)
        part = Followed(FixedTexts(own, table, state.positions, 64), latest)
        with Strict():
            draft = drafter.propose(state, {heads.memory: part})
            plan = TreePlan([draft], state.positions, 64, table, meta.attention, meta.spans)
            accepted, hidden_BNF, _ = verify(meta, pool, plan, make_rule("greedy", "meta"), state)
            path_BAF = accepted.along_path(hidden_BNF)
            after = heads.memory.advance(part, path_BAF, accepted.tokens, accepted.counts)
    assert (draft.tokens.shape, after.shape) == ((2, 12), latest.shape)


def on_meta(base):
    model = AutoModelForCausalLM.from_config(base.model.config).to("meta")
    for layer in (model.lm_head, model.model.embed_tokens):
        layer._hf_hook = SimpleNamespace(execution_device="meta")
    meta = BaseModel(model, None)
    meta.spans = base.spans  # rules of masks cannot be asked for without values
    return meta


def meta_state(meta):
    """The state of two texts, and a table of their blocks."""
    numbers = {
        name: torch.zeros(2, dtype=torch.int64, device="meta") for name in ("roots", "positions", "seeds", "starts")
    }
    state = DecodeState(
        **numbers,
        hidden=torch.zeros(2, meta.feature_size, device="meta"),
        active=torch.ones(2, dtype=torch.bool, device="meta"),
        history=torch.zeros(2, 65, dtype=torch.int64, device="meta"),
    )
    return state, BlockTable(torch.zeros(2, 2, dtype=torch.int64, device="meta"), BLOCK)


def test_growth_in_the_middle_of_an_answer_changes_no_token(eager, fresh, monkeypatch):
    monkeypatch.setattr("medusa.engine.graph.SHORTEST", 16)
    options = {"max_new_tokens": 26, "drafter": "heads", "ignore_eos": True, "nodes": 9, "temperature": 1.0, "seed": 3}
    assert tokens(fresh.generate(PROMPTS, **options)) == tokens(eager.generate(PROMPTS, **options))
    grown = fresh.recorder.recorded
    assert grown > 1, "longer texts, larger buckets"
    fresh.generate(PROMPTS, **options)
    assert fresh.recorder.recorded == grown, "all of them are kept"


def tokens(outputs):
    """Drafts differ where the host decides; the text does not."""
    return [output.tokens for output in outputs]


def test_what_is_recorded_serves_later_calls(eager, fresh):
    options = {"max_new_tokens": 5, "temperature": 0.7, "nodes": 16, "ignore_eos": True}
    first = fresh.generate(PROMPTS, seed=0, **options)
    for seed in (0, [1, 2, 3]):
        expected = eager.generate(PROMPTS, seed=seed, **options)
        outputs = fresh.generate(PROMPTS, seed=seed, **options)
        assert tokens(outputs) == tokens(expected)
        assert (tokens(outputs) == tokens(first)) == (seed == 0)
    assert fresh.recorder.recorded == 1
    fresh.generate(PROMPTS[::-1], **options)
    assert fresh.recorder.recorded == 1, "other prompts of that batch size"
    fresh.generate(PROMPTS[0], **options)
    assert fresh.recorder.recorded == 1, "there is room for one where there is for three"
    fresh.generate(PROMPTS * 2, **options)
    assert fresh.recorder.recorded == 2, "a larger batch"
    fresh.generate(PROMPTS, **(options | {"temperature": 0.8}))
    assert fresh.recorder.recorded == 3, "another rule"
    fresh.generate(PROMPTS, **(options | {"nodes": 5}))
    assert fresh.recorder.recorded == 4, "another drafter"
    fresh.generate(PROMPTS, **options)
    assert fresh.recorder.recorded == 4, "all of them are kept"


def test_a_prompt_is_computed_in_each_call(fresh):
    prompt = list(range(3, 73))
    outputs = [fresh.generate(prompt, max_new_tokens=3, nodes=1) for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 0]
    fresh.graphs.pool.check_integrity()


@pytest.mark.parametrize("limit", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7))])
def test_answers_that_end_before_others_end_where_eager_ones_do(eager, ending_with, limit):
    """By a token, a string or a limit, in the middle of what a step accepts; the next step is under way already."""
    drafter = HybridDrafter([lookup(4)], [heads_drafter(eager.heads, eager.base, 12)], 12)
    full = eager.generate(PROMPTS, max_new_tokens=20, drafter=drafter)
    base = ending_with(full[0].tokens[limit], full[2].tokens[limit + 9])
    shorter, recorded = MedusaModel(base, eager.heads), graphed(base, eager.heads)
    for options in ({"stop": full[1].text[limit : limit + 2]}, {"max_steps": limit}, {"max_new_tokens": limit}, {}):
        options = {"max_new_tokens": 20, "drafter": drafter} | options
        expected = shorter.generate(PROMPTS, **options)
        assert contents(recorded.generate(PROMPTS, **options)) == contents(expected)
    assert len({output.steps for output in expected}) > 1, "some end before others"


def test_a_given_up_answer_gives_its_buffers_back(eager, fresh):
    options = {"max_new_tokens": 12, "nodes": 9}
    stream = fresh.stream(PROMPTS[0], **options)
    next(iter(stream))
    assert 0 < len(stream.output.tokens) < 12
    assert fresh.graphs.pool.held_tokens == 0
    with torch.inference_mode():
        for arena in fresh.graphs.pool.arenas:
            for buffer in arena.buffers:
                buffer.fill_(torch.nan)  # whatever it left there
    assert fresh.generate(PROMPTS[2], **options).tokens == eager.generate(PROMPTS[2], **options).tokens
    assert fresh.recorder.recorded == 1


def test_answers_at_the_same_time_share_no_buffers(eager, fresh):
    options = {"max_new_tokens": 12, "nodes": 9, "ignore_eos": True}
    fresh.generate(PROMPTS[1], **options)
    streams = [fresh.stream(prompt, **options) for prompt in PROMPTS]
    for _ in zip_longest(*map(iter, streams)):
        pass
    for stream, prompt in zip(streams, PROMPTS, strict=True):
        assert stream.output.tokens == eager.generate(prompt, **options).tokens
    assert fresh.recorder.recorded == 3


def test_a_batch_of_any_size_runs_in_a_bucket(eager, fresh):
    """Inert requests fill it up and write into a block that is nobody's."""
    options = {"max_new_tokens": 6, "nodes": 9, "ignore_eos": True}
    for count in (3, 4, 5, 8, 3):
        prompts = [[5 + n, 6, 7] for n in range(count)]
        assert tokens(fresh.generate(prompts, **options)) == tokens(eager.generate(prompts, **options))
    assert fresh.recorder.recorded == 2, "buckets of 4 and of 8"


def test_a_failed_answer_keeps_its_buffers_to_itself(eager, fresh, monkeypatch):
    options = {"max_new_tokens": 8, "nodes": 9}
    fresh.generate(PROMPTS, **options)
    with monkeypatch.context() as patch:
        patch.setattr(PassLayer, "update", None)
        with pytest.raises(TypeError):
            fresh.generate(PROMPTS, **options)
    assert tokens(fresh.generate(PROMPTS, **options)) == tokens(eager.generate(PROMPTS, **options))


def test_a_prefix_has_graphs_of_its_own(eager, fresh):
    prefix, prompt, options = Prefix(), PROMPTS[0] * 6, {"max_new_tokens": 8, "nodes": 9}
    for turn in range(3):
        output = fresh.generate(prompt, prefix=prefix, **options)
        assert output.tokens == eager.generate(prompt, **options).tokens
        assert output.cached_tokens > 0 or turn == 0
        prompt = [*prompt, *output.tokens, 3, 4 + turn]
    assert fresh.recorder.recorded == 1
    stream = fresh.stream(prompt, prefix=prefix, **options)
    next(iter(stream))
    assert fresh.generate(prompt, prefix=prefix, **options).tokens == eager.generate(prompt, **options).tokens


def test_where_recording_fails_steps_go_on_eagerly(base, eager, caplog):
    attempts = []

    def fail(function):
        attempts.append(function)
        raise RuntimeError("operation not permitted when stream is capturing")

    model, options = graphed(base, eager.heads, fail), {"max_new_tokens": 8, "nodes": 9}
    with caplog.at_level(logging.INFO, "medusa.engine.graph"):
        for _ in range(2):
            assert tokens(model.generate(PROMPTS, **options)) == tokens(eager.generate(PROMPTS, **options))
    assert len(attempts) == 1
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert "operation not permitted" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda base: base.with_traits(decoding="chain"), "does not verify trees"),
        (lambda base: base.with_traits(explicit_mask=True), "gets its masks with each call"),
    ],
)
def test_bases_that_stay_eager(base, fresh, change, reason, caplog):
    assert reason in objection(fresh, change(base), PlainDrafter(), caplog)


def test_drafters_and_attention_that_stay_eager(base_directory, fresh, base, caplog):
    custom = Chain(PROMPTS, base.vocab_size)
    assert "drafter (Chain) is not recordable" in objection(fresh, base, custom, caplog)
    assert "(HybridDrafter) is not recordable" in objection(
        fresh, base, HybridDrafter([lookup(3)], [custom], 8), caplog
    )
    flash = BaseModel.load(base_directory, device="cpu", attention="flash")
    assert "attention (flash) reads lengths" in objection(graphed(flash, None), flash, PlainDrafter(), caplog)


def objection(model, base, drafter, caplog):
    """What is logged, once, where steps stay eager."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "medusa.engine.graph"):
        for _ in range(2):
            model.graphs.steps(base, [CachedSequence(base.new_pool())], drafter, make_rule("greedy"), None)
    assert len(caplog.records) == 1
    return caplog.text


def test_memory_is_bounded_and_can_be_freed(fresh, monkeypatch):
    monkeypatch.setattr("medusa.engine.graph.KEPT_GRAPHS", 2)
    monkeypatch.setattr("medusa.engine.graph.KEPT_BUCKETS", 3)
    for nodes in (1, 3, 4, 4, 1):
        fresh.generate([40], max_new_tokens=3, nodes=nodes)
    assert fresh.recorder.recorded == 4, "the first was forgotten for the last"
    for power in range(4):
        fresh.generate([[7]] * 2**power, max_new_tokens=3, nodes=1)
    assert len(fresh.graphs._idle) == 3
    buckets = [weakref.ref(bucket) for bucket in fresh.graphs._idle]
    memory = weakref.ref(fresh.graphs.pool.arenas[0].keys)
    gc.disable()
    fresh.release()
    freed = [bucket() for bucket in buckets]
    assert memory() is None
    gc.enable()
    assert freed == [None] * 3
    assert len(fresh.generate([7], max_new_tokens=3).tokens) == 3


def test_graphs_need_a_gpu(base):
    with pytest.raises(ValueError, match=r"graph .True. needs a CUDA device and the base is on cpu"):
        MedusaModel(base, graph=True)
    assert MedusaModel(base).graphs is None


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "llama4_text", "opt", "phi3"])
def test_families_that_look_at_their_cache(family, tokenizer):
    """Windows, chunks, learned positions, queries scaled by their place: none may depend on the host's lengths."""
    base = BaseModel(tiny(family)[0].model, tokenizer, family)
    eager, model = MedusaModel(base), graphed(base, None)
    options = {"max_new_tokens": 12, "ignore_eos": True, "drafter": "prompt-lookup", "nodes": 8}
    assert tokens(model.generate(PROMPTS, **options)) == tokens(eager.generate(PROMPTS, **options))
    assert model.recorder.recorded == 1


def test_the_tape_repeats_kernels_and_not_python():
    """What all of these tests lean on."""
    total, numbers = torch.zeros(3), iter(range(1, 9))

    def add():
        total.add_(torch.ones(3).mul(next(numbers)) + total[:1])

    tape = Tape(add)
    assert total.tolist() == [0, 0, 0], "recording leaves no trace"
    tape()
    tape()
    assert total.tolist() == [3, 3, 3], "1, then 1 + 2 * 1: Python's number is the first one for ever"
    waits = [total[0].item, lambda: bool(total[0] > 0), lambda: total[total > 0], lambda: torch.tensor([1])]
    for wait in waits:
        with pytest.raises(RuntimeError, match="not permitted"):
            Tape(wait)
