"""A prompt that begins like the text before it is not computed again, and its answer is the same."""

import gc
import random
import weakref
from contextlib import contextmanager
from itertools import zip_longest

import pytest

from medusa import BaseModel, MedusaModel, Prefix
from medusa.cache import SlotLayer

PROMPT = "def read_lines(path):"
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


@pytest.mark.parametrize("options", OPTIONS)
def test_a_second_turn_computes_only_what_is_new(model, base, encode, options):
    prefix, options = Prefix(), {"max_new_tokens": 30} | options
    prompt = encode(PROMPT)
    first = model.generate(prompt, prefix=prefix, **options)
    follow_up = [*prompt, *first.tokens, *encode(" and then?")]
    expected = model.generate(follow_up, **options)
    with rows_of(base) as rows:
        second = model.generate(follow_up, prefix=prefix, **options)
    assert (first.cached_tokens, expected.cached_tokens) == (0, 0)
    assert len(prompt) + len(first.tokens) - second.cached_tokens in (0, 1), "the last token has no row, as a rule"
    assert rows[0] == len(follow_up) - second.cached_tokens
    assert second.tokens == expected.tokens


def test_a_refused_request_leaves_the_rows_to_the_next(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=4)
    with pytest.raises(ValueError, match="logit_bias"):
        model.generate(prompt, prefix=prefix, max_new_tokens=4, logit_bias={10**6: 1.0})
    assert model.generate(prompt, prefix=prefix, max_new_tokens=4).cached_tokens == len(prompt) - 2


@pytest.mark.parametrize("options", OPTIONS)
def test_edited_prompts_get_the_answers_of_an_empty_cache(model, encode, options):
    """Shorter, longer, the same, one token, changed in the middle: whatever the text before was."""
    chance, prefix, options = random.Random(0), Prefix(), {"max_new_tokens": 12} | options
    prompt, before, reused = encode(PROMPT), [], 0
    for turn in range(10):
        output = model.generate(prompt, prefix=prefix, **options)
        assert output.tokens == model.generate(prompt, **options).tokens, turn
        shared = max(n for n in range(len(prompt) + 1) if before[:n] == prompt[:n])
        assert max(0, min(shared, len(prompt) - 2)) - output.cached_tokens in (0, 1)
        reused += output.cached_tokens
        before = [*prompt, *output.tokens]
        keep = chance.choice([1, 2, len(prompt), len(before), chance.randrange(1, len(before))])
        prompt = before[:keep][-150:] + chance.choice([[], encode("x"), encode(" = 5\n")])
    assert reused > 50


def test_the_same_prompt_again_computes_one_row(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    first, again = (model.generate(prompt, prefix=prefix, max_new_tokens=20) for _ in range(2))
    assert again.tokens == first.tokens
    assert again.cached_tokens == len(prompt) - 2


def test_a_stopped_stream_leaves_what_is_right(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    stream = model.stream(prompt, prefix=prefix, max_new_tokens=60)
    next(iter(stream))
    follow_up = [*prompt, *stream.output.tokens, *encode("!")]
    output = model.generate(follow_up, prefix=prefix, max_new_tokens=20)
    assert output.cached_tokens >= len(prompt)
    assert output.tokens == model.generate(follow_up, max_new_tokens=20).tokens


@pytest.mark.parametrize("method", ["update", "resize"])
@pytest.mark.parametrize("nodes", [1, 16])
def test_an_interruption_anywhere_changes_no_later_answer(model, encode, monkeypatch, method, nodes):
    """Ctrl-C between any two layers, in the prefill, in a step and while the cache grows."""
    new_cache, work = BaseModel.new_cache, getattr(SlotLayer, method)
    monkeypatch.setattr(BaseModel, "new_cache", lambda base, slots: new_cache(base, slots, capacity=4))
    prompt, options = encode(PROMPT), {"max_new_tokens": 16, "nodes": nodes}
    expected = [model.generate(text, prefix=Prefix(), **options).tokens for text in (prompt, [*prompt, *encode("?")])]
    calls, last, interrupted = 0, 0, 0

    def working(*arguments, **others):
        nonlocal calls
        calls += 1
        if calls == last:
            raise KeyboardInterrupt
        return work(*arguments, **others)

    monkeypatch.setattr(SlotLayer, method, working)
    for count in range(1, 16, 2) if method == "update" else range(1, 9):
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


def test_two_answers_at_once_share_nothing(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=20)
    texts = [prompt, [*prompt, *encode("?")]]
    streams = [model.stream(text, prefix=prefix, max_new_tokens=40) for text in texts]
    pieces = [iter(stream) for stream in streams]
    for _ in zip_longest(*pieces):
        pass
    for stream, text in zip(streams, texts, strict=True):
        assert stream.output.tokens == model.generate(text, max_new_tokens=40).tokens
    assert [stream.output.cached_tokens for stream in streams] == [len(prompt) - 2, 0]


def test_another_base_starts_from_nothing(model, base, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=5)
    other = MedusaModel(BaseModel(base.model, base.tokenizer))
    assert other.generate(prompt, prefix=prefix, max_new_tokens=5).cached_tokens == 0


def test_a_cleared_prefix_frees_its_rows_at_once(model, encode):
    prefix, prompt = Prefix(), encode(PROMPT)
    model.generate(prompt, prefix=prefix, max_new_tokens=5)
    cache = weakref.ref(prefix._cache)
    gc.disable()
    prefix.clear()
    freed = cache() is None
    gc.enable()
    assert freed
    assert model.generate(prompt, prefix=prefix, max_new_tokens=5).cached_tokens == 0


def test_one_prefix_is_one_text(model):
    with pytest.raises(ValueError, match="prefix holds one text and there are 2 prompts"):
        model.generate(["a", "b"], prefix=Prefix())
