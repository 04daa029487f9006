"""The cache grows between steps, copies nothing in a step, and never changes a token by it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import BaseModel, Draft, Tree
from medusa.acceptance import greedy
from medusa.attention import TreePlan, choose
from medusa.cache import SlotCache
from medusa.drafters import HeadsDrafter, PlainDrafter, PromptLookupDrafter
from medusa.engine.prefill import prefill
from medusa.engine.step import decode_step

PROMPTS = ["def f(x):", "a", "once upon a time"]


def buffers(cache):
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def test_rows_beyond_the_limit_are_refused():
    with pytest.raises(ValueError, match=r"rows per slot \(5\) exceed the limit \(4\); ask for a larger limit"):
        SlotCache(1, 2, 1, "cpu", limit=4).begin(5)


def test_the_capacity_doubles_up_to_the_limit():
    cache, seen = SlotCache(1, 4, 1, "cpu", limit=50), []
    for rows in (3, 5, 8, 9, 40, 41, 50):
        cache.reserve(rows)
        seen.append(cache.capacity)
    assert seen == [4, 8, 8, 16, 40, 50, 50]


def test_growth_keeps_the_rows_of_every_slot():
    cache = SlotCache(2, 4, 1, "cpu")
    rows = torch.arange(2 * 3 * 4.0).view(2, 1, 3, 4)
    cache.begin(3)
    cache.layers[0].update(rows, -rows)
    cache.extend(torch.tensor([3, 1]))
    cache.grow([3, 1])
    cache.begin(9)
    keys, values = cache.layers[0].update(*torch.full((2, 2, 1, 9, 4), 100.0))
    assert cache.capacity == 12
    assert torch.equal(keys[0, 0, :3], rows[0, 0])
    assert torch.equal(values[1, 0, :1], -rows[1, 0, :1])
    assert (keys[0, 0, 3:12] == 100).all()
    assert (keys[1, 0, 1:10] == 100).all()


@pytest.mark.parametrize(
    ("headroom", "options"),
    [(1, {"nodes": 1}), (7, {"nodes": 16}), (1, {"nodes": 9, "temperature": 1.0, "seed": 3})],
)
def test_growth_in_the_middle_of_an_answer_changes_no_token(model, monkeypatch, headroom, options):
    expected = model.generate(PROMPTS, max_new_tokens=90, **options)
    monkeypatch.setattr("medusa.engine.prompts.HEADROOM", headroom)
    assert [o.tokens for o in model.generate(PROMPTS, max_new_tokens=90, **options)] == [o.tokens for o in expected]


class Count(TorchDispatchMode):
    """Notes fresh floating-point tensors of at least ``large`` elements: what a copy of the prefix would be."""

    def __init__(self, large):
        super().__init__()
        self.large, self.copies = large, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.numel() >= self.large:
            known = {t.untyped_storage().data_ptr() for t in arguments if isinstance(t, torch.Tensor)}
            if out.untyped_storage().data_ptr() not in known:
                self.copies.append(function)
        return out


@pytest.mark.parametrize("drafter", ["plain", "tree"])
def test_a_step_copies_no_prefix(base, make_heads, drafter):
    """Two key heads of 8 numbers make keys of 16 numbers a row, 4 nodes and 2 groups a mask of 8: 12 lies between."""
    prompt = [3 + i % 50 for i in range(200)]
    cache = base.new_cache(1, 250)
    state = prefill(base, cache, [prompt])
    tree = PlainDrafter() if drafter == "plain" else HeadsDrafter(make_heads(), base, 4, Tree.full([3]))
    pointers = [tensor.data_ptr() for tensor in buffers(cache)]
    with Count(large=12 * len(prompt)) as count:
        for _ in range(5):
            state = decode_step(base, cache, tree, greedy, state).state
    assert count.copies == []
    assert [tensor.data_ptr() for tensor in buffers(cache)] == pointers
    with Count(large=12 * len(prompt)) as count:
        cache.reserve(251)
    assert len(count.copies) == 4, "two layers' keys and values: the test sees copies where there are some"


def test_an_answer_of_two_thousand_rows(tokenizer):
    """One cache from 8 rows up to two thousand, against transformers' own cache."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    base = BaseModel(LlamaForCausalLM(config).double(), tokenizer)
    cache, drafter = base.new_cache(1, 8), PromptLookupDrafter(16)
    state, text = prefill(base, cache, [[5, 6, 7]]), [5, 6, 7]
    while len(text) < 2000:
        result = decode_step(base, cache, drafter, greedy, state)
        text, state = text + result.tokens[0], result.state
    assert 2000 <= cache.capacity < 5000
    assert state.history[0, : len(text)].tolist() == text
    logits = base.logits(base.hidden_states(torch.tensor([text])))[0]
    assert logits[2:-1].argmax(-1).tolist() == text[3:]


def test_cutting_forgets_rows_exactly(base, model):
    ids = base.tokenizer(PROMPTS).input_ids
    expected = [o.tokens for o in model.generate(PROMPTS, max_new_tokens=20)]
    cache = base.new_cache(3, 8)
    prefill(base, cache, [[*prompt, 9, 9, 9] for prompt in ids])
    cache.cut([4, 0, 7])
    state, texts = prefill(base, cache, ids), [[] for _ in ids]
    for _ in range(20):
        result = decode_step(base, cache, PlainDrafter(), greedy, state)
        state, texts = result.state, [text + new for text, new in zip(texts, result.tokens, strict=True)]
    assert texts == expected


def test_layers_may_live_on_several_devices():
    """A second device that any machine has: tensors on "meta" have shapes and a device, and operations check both."""
    cache, here, away = SlotCache(2, 4, 2, "cpu"), torch.randn(2, 1, 3, 4), torch.device("meta")
    plain = SlotCache(2, 4, 1, "cpu")
    for states in (cache, plain):
        states.begin(3)
        states.layers[0].update(here, here)
    keys, _ = cache.layers[1].update(here.to(away), here.to(away))
    assert (keys.device, keys.shape) == (away, (2, 1, 3, 4))
    for states in (cache, plain):
        states.commit(torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 1]))
        states.grow([2, 1])
        states.reserve(9)
    assert torch.equal(cache.layers[0].keys, plain.layers[0].keys)
    assert (cache.layers[1].keys.device, cache.layers[1].keys.shape) == (away, cache.layers[0].keys.shape)
    backend, _ = choose("reference", torch.device("cpu"), torch.float32)
    plan = TreePlan(Draft.chain(torch.zeros(2, 3, dtype=torch.int64)), cache.lengths, 5, backend)
    assert plan.bias(1, torch.float32, away).device == away
