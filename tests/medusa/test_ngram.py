"""The n-gram cache: what earlier texts teach, bounded, saved, and never more than a guess."""

import dataclasses
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa import MedusaModel, Speculation
from medusa.drafters.ngram import FORMAT, KEPT, NgramCache, NgramDrafter
from tests.medusa.states import decode_state

TEXT = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 2, 3, 4, 5]


def paths(tree):
    """Token paths below the root."""
    found = {0: ()}
    for index, node in enumerate(tree[1:], start=1):
        found[index] = (*found[node.parent], node.token)
    return list(found.values())[1:]


def test_the_longest_known_context_counts_and_the_likeliest_path_comes_first():
    cache = NgramCache()
    cache.learn(TEXT)
    assert dict(cache.following((2, 3, 4))).keys() == {5, 6}
    assert dict(cache.following((1, 2, 3, 4))).keys() == {5}, "a longer context that is known"
    assert dict(cache.following((8, 2, 3, 4))).keys() == {5, 6}, "a shorter one where it is not"
    assert list(cache.following((7, 7))) == []
    tree = cache.tree([8, 2, 3, 4], 4)
    assert [node.token for node in tree] == [4, 5, 6, 9]
    assert paths(tree) == [(5,), (6,), (5, 9)]
    assert paths(cache.tree([8, 2, 3, 4], 9, branches=1)) == [(5,), (5, 9), (5, 9, 2)]
    assert [node.token for node in cache.tree([7], 5)] == [7]


def test_it_is_bounded_and_forgets_what_was_not_met_for_longest():
    cache = NgramCache(capacity=30)
    cache.learn(range(8))
    for start in range(100, 1000, 5):
        cache.learn(range(8))
        cache.learn(range(start, start + 5))
    assert len(cache) == 30
    assert dict(cache.following((3, 4))).keys() == {5}
    assert list(cache.following((100, 101))) == []
    for token in range(50):
        cache.learn([1, 1, token])
        cache.learn([1, 1, 7])
    kept = dict(cache.following((1, 1)))
    assert len(kept) == KEPT
    assert max(kept, key=kept.get) == 7


def test_a_saved_cache_is_read_back(tmp_path):
    cache = NgramCache()
    assert cache.fill([TEXT, [5, 6, 7]]) == len(TEXT) + 3
    cache.save(tmp_path / "some" / "ngrams.safetensors")
    again = NgramCache.load(tmp_path / "some" / "ngrams.safetensors")
    assert again._counts == cache._counts
    assert len(NgramCache.load(tmp_path / "some" / "ngrams.safetensors", capacity=5)) == 5
    NgramCache().save(tmp_path / "empty")
    assert len(NgramCache.load(tmp_path / "empty")) == 0
    (tmp_path / "broken").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="cannot be read"):
        NgramCache.load(tmp_path / "broken")
    with pytest.raises(ValueError, match="holds token 9, and the base has 9 tokens: it was saved with another base"):
        NgramCache.load(tmp_path / "some" / "ngrams.safetensors", vocab_size=9)
    with pytest.raises(FileNotFoundError):
        NgramCache.load(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"capacity \(0\)"):
        NgramCache(0)


@pytest.mark.parametrize("name", ["contexts", "following"])
def test_damaged_tables_are_one_error(name, tmp_path):
    cache = NgramCache()
    cache.learn(TEXT)
    cache.save(tmp_path / "ngrams")
    tensors = load_file(tmp_path / "ngrams")
    save_file(tensors | {name: tensors[name][1:]}, tmp_path / "ngrams", metadata={"format": FORMAT})
    with pytest.raises(ValueError, match=r"cannot be read: its tables have other shapes; save it again"):
        NgramCache.load(tmp_path / "ngrams")


def test_threads_may_share_a_cache(tmp_path):
    cache, interval = NgramCache(300), sys.getswitchinterval()

    def teach(seed):
        random = Random(seed)
        for _ in range(60):
            cache.learn([random.randrange(6) for _ in range(30)])

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as pool:
            taught = [pool.submit(teach, seed) for seed in range(3)]
            while not all(one.done() for one in taught):
                cache.tree([1, 2, 3, 4], 16)
                cache.save(tmp_path / "ngrams")
    finally:
        sys.setswitchinterval(interval)
    assert [one.result() for one in taught] == [None] * 3
    assert NgramCache.load(tmp_path / "ngrams").tree([1, 2, 3, 4], 16)


def test_rows_of_a_batch_draft_apart(base):
    cache = NgramCache()
    cache.learn(TEXT)
    draft = NgramDrafter(cache, 5).propose(decode_state([[8, 2, 3, 4], [4], [9, 2]], base))
    assert draft.sizes == (4, 1, 3)
    assert draft.tokens.tolist() == [[4, 5, 6, 9], [4, 0, 0, 0], [2, 3, 4, 0]]
    with pytest.raises(ValueError, match="at least 2"):
        NgramDrafter(cache, 1)


def test_requests_that_name_it_teach_each_other_and_texts_stay(base):
    model, prompts = MedusaModel(base), [[5, 6, 7], [9, 8]]
    plain = model.generate(prompts, max_new_tokens=40, ignore_eos=True)
    assert len(model.ngrams) == 0
    first = model.generate(prompts, max_new_tokens=40, drafter="ngram", nodes=6, ignore_eos=True)
    assert len(model.ngrams) > 0
    again = model.generate(prompts, max_new_tokens=40, drafter="ngram", nodes=6, ignore_eos=True)
    assert [o.tokens for o in plain] == [o.tokens for o in first] == [o.tokens for o in again]
    assert sum(o.steps for o in again) < sum(o.steps for o in plain) / 2
    sampled = {"max_new_tokens": 30, "temperature": 0.9, "seed": [3, 4], "nodes": 6, "ignore_eos": True}
    texts = [
        model.generate(prompts, drafter=name, **sampled) for name in ("ngram", "prompt-lookup", "prompt-lookup+ngram")
    ]
    expected = [o.tokens for o in model.generate(prompts, **sampled | {"nodes": 1})]
    assert all([o.tokens for o in outputs] == expected for outputs in texts)


def test_several_drafters_share_a_tree(base, make_heads):
    model, options = MedusaModel(base, make_heads()), {"max_new_tokens": 30, "ignore_eos": True}
    plain = model.generate([5, 6, 7], nodes=1, **options)
    for _ in range(2):
        shared = model.generate([5, 6, 7], drafter="heads+prompt-lookup+ngram", **options)
        assert shared.tokens == plain.tokens


@pytest.mark.parametrize("name", ["ngram+ngram", "heads+", "lookup", "heads-sampled+ngram", ""])
def test_names_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match="joined by"):
        Speculation(drafter=name)


def test_guesses_of_other_texts_count_less_where_they_are_wrong(base):
    """What is proposed is judged by the text that follows, as long as its rows stay together."""
    cache = NgramCache()
    cache.learn([1, 2, 3, 4, 5, 6, 7, 8, 9])
    drafter, text = NgramDrafter(cache, 6), [1, 2, 3, 4]
    state = decode_state([text], base)
    sure = drafter.propose(state).scores[0, 1].item()
    for _ in range(40):  # the text says 9 where 5 was guessed, and the next guess is asked for at the same place
        state.history[0, 4] = 9
        drafter.propose(dataclasses.replace(state, positions=state.positions + 1, roots=torch.tensor([9])))
        state.history[0, 4] = 0
        doubted = drafter.propose(state)
    assert doubted.scores[0, 1:].sum() == 0 or doubted.scores[0, 1].item() < sure - 1
    assert doubted.tokens.shape[1] < 6
    for _ in range(200):
        cache.judge(-0.7, True)
    assert dict(cache.following((1, 2, 3, 4)))[5] == pytest.approx(sure)
    other = dataclasses.replace(state, history=state.history.clone())
    before = cache._expected
    drafter.propose(other)
    assert cache._expected == before, "another batch"
