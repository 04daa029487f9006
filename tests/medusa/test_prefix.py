"""A prompt that begins like a text before it is not computed again, and its answer is the same."""

import gc
import random
import weakref
from contextlib import contextmanager
from itertools import zip_longest

import pytest

from medusa import BaseModel, MedusaModel, Prefix, Tree
from medusa.cache import BLOCK
from medusa.cache.layer import PassLayer
from medusa.drafters import PromptLookupDrafter

PROMPT = "def read_lines(path): return [line.rstrip() for line in open(path)]"
OPTIONS = [
    {"nodes": 1, "temperature": 0.0},
    {"nodes": 16, "temperature": 0.0},
    {"nodes": 16, "temperature": 1.0, "seed": 5},
    {"nodes": 9, "temperature": 1.0, "drafter": "prompt-lookup", "seed": 6},
]


@pytest.fixture
def encode(base):
    return lambda text: base.tokenizer(text).input_ids


@contextmanager
def rows_of(base):
    """Counts the rows that go through the base, pass by pass."""
    rows = []
    hook = base.decoder.register_forward_hook(lambda *call: rows.append(call[-1].last_hidden_state.shape[1]))
    yield rows
    hook.remove()


def whole(tokens):
    """Of so many tokens those in whole blocks."""
    return tokens // BLOCK * BLOCK


@pytest.mark.parametrize("options", OPTIONS[::2])
def test_a_second_turn_computes_only_what_is_new(model, base, encode, options):
    prefix, options = Prefix(), {"max_new_tokens": 24, "ignore_eos": True} | options
    prompt = encode(PROMPT)
    first = model.generate(prompt, prefix=prefix, **options)
    follow_up = [*prompt, *first.tokens, *encode(" and then?")]
    expected = model.generate(follow_up, **options)
    with rows_of(base) as rows:
        second = model.generate(follow_up, prefix=prefix, **options)
    assert (first.cached_tokens, expected.cached_tokens) == (0, 0)
    assert second.cached_tokens == whole(len(prompt) + len(first.tokens) - 1)
    assert rows[0] == len(follow_up) - second.cached_tokens
    assert second.tokens == expected.tokens


def test_a_refused_request_leaves_what_there_is_to_the_next(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=4)
    with pytest.raises(ValueError, match="logit_bias"):
        model.generate(prompt, prefix=prefix, max_new_tokens=4, logit_bias={10**6: 1.0})
    assert model.generate(prompt, prefix=prefix, max_new_tokens=4).cached_tokens == whole(len(prompt) - 1)


@pytest.mark.parametrize("options", OPTIONS[1::2])
def test_edited_prompts_get_the_answers_of_an_empty_cache(model, encode, options):
    """Shorter, longer, the same, one token, changed in the middle: whatever the texts before were."""
    chance, prefix, options = random.Random(0), Prefix(), {"max_new_tokens": 8} | options
    prompt, texts, reused = encode(PROMPT), [], 0
    for turn in range(7):
        output = model.generate(prompt, prefix=prefix, **options)
        assert output.tokens == model.generate(prompt, **options).tokens, turn
        shared = [n for text in texts for n in range(min(len(text), len(prompt))) if text[:n] == prompt[:n]]
        assert output.cached_tokens <= max([0, *shared])
        reused += output.cached_tokens
        texts.append([*prompt, *output.tokens])
        keep = chance.choice([1, 2, len(prompt), len(texts[-1]), chance.randrange(1, len(texts[-1]))])
        prompt = texts[-1][:keep][-150:] + chance.choice([[], encode("x"), encode(" = 5\n")])
    assert reused > 50


def test_a_stopped_stream_leaves_what_is_right(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    stream = model.stream(prompt, prefix=prefix, max_new_tokens=60)
    next(iter(stream))
    follow_up = [*prompt, *stream.output.tokens, *encode("!")]
    output = model.generate(follow_up, prefix=prefix, max_new_tokens=20)
    assert output.cached_tokens >= whole(len(prompt))
    assert output.tokens == model.generate(follow_up, max_new_tokens=20).tokens


@pytest.mark.parametrize("nodes", [1, 16])
def test_an_interruption_anywhere_changes_no_later_answer(model, encode, monkeypatch, nodes):
    """Ctrl-C between any two layers, in the prefill and in a step; no block is lost by it."""
    prompt, options = encode(PROMPT), {"max_new_tokens": 10, "nodes": nodes}
    expected = [model.generate(text, prefix=Prefix(), **options).tokens for text in (prompt, [*prompt, *encode("?")])]
    update, calls, last, interrupted = PassLayer.update, 0, 0, 0

    def working(*arguments, **others):
        nonlocal calls
        calls += 1
        if calls == last:
            raise KeyboardInterrupt
        return update(*arguments, **others)

    monkeypatch.setattr(PassLayer, "update", working)
    for count in range(1, 16, 3):
        prefix, calls, last = Prefix(), 0, count
        try:
            model.generate(prompt, prefix=prefix, **options)
        except KeyboardInterrupt:
            interrupted += 1
        last = 0
        again = model.generate([*prompt, *encode("?")], prefix=prefix, **options)
        assert again.tokens == expected[1]
        assert model.generate(prompt, prefix=prefix, **options).tokens == expected[0]
    assert interrupted > 3


def test_answers_at_the_same_time_share_what_was_there(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=20)
    texts = [prompt, [*prompt, *encode("?")]]
    streams = [model.stream(text, prefix=prefix, max_new_tokens=20) for text in texts]
    pieces = [iter(stream) for stream in streams]
    for _ in zip_longest(*pieces):
        pass
    for stream, text in zip(streams, texts, strict=True):
        assert stream.output.tokens == model.generate(text, max_new_tokens=20).tokens
    assert [stream.output.cached_tokens for stream in streams] == [whole(len(prompt) - 1)] * 2


def test_a_prefix_that_is_full_of_what_grows_says_so(model, encode):
    prefix = Prefix(7 * BLOCK)
    streams = [model.stream(encode(letter * 90), prefix=prefix, max_new_tokens=4, nodes=1) for letter in "ac"]
    for stream in streams:
        next(stream._steps)
    with pytest.raises(ValueError, match=r"KV cache \(224 positions\) is full of other texts that still grow"):
        model.generate(encode("b" * 90), prefix=prefix, max_new_tokens=4, nodes=1)
    for stream in streams:
        stream._steps.close()


def test_trees_that_exceed_a_prefix_are_refused_at_once(model, encode):
    for draft in ({"nodes": 200}, {"tree": Tree.full([10, 5, 3])}, {"drafter": PromptLookupDrafter(nodes=200)}):
        with pytest.raises(ValueError, match=r"exceed the KV cache \(192 positions\)"):
            model.generate(encode("b" * 30), prefix=Prefix(6 * BLOCK), max_new_tokens=4, **draft)


def test_what_ends_makes_room_for_the_prompts_that_wait(model, encode):
    prompts = [encode(letter * 90) for letter in "abc"]
    alone = [model.generate(prompt, max_new_tokens=4, nodes=1).tokens for prompt in prompts]
    outputs = model.generate(prompts, prefix=Prefix(7 * BLOCK), max_new_tokens=4, nodes=1)
    assert [output.tokens for output in outputs] == alone


def test_another_base_starts_from_nothing(model, base, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=5)
    tokenizer, other = base.tokenizer, type(base.model)(base.model.config).double()
    assert MedusaModel(BaseModel(other, tokenizer)).generate(prompt, prefix=prefix, max_new_tokens=5).cached_tokens == 0


def test_a_cleared_prefix_frees_its_memory_at_once(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=5)
    memory = weakref.ref(prefix.pool(model.base).arenas[0].keys)
    gc.disable()
    prefix.clear()
    freed = memory() is None
    gc.enable()
    assert freed
    assert model.generate(prompt, prefix=prefix, max_new_tokens=5).cached_tokens == 0


def test_several_prompts_share_a_prefix(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=5)
    outputs = model.generate([prompt, [*prompt, 9]], prefix=prefix, max_new_tokens=5)
    assert [output.cached_tokens for output in outputs] == [whole(len(prompt) - 1)] * 2
    assert outputs[0].tokens == model.generate(prompt, max_new_tokens=5).tokens
