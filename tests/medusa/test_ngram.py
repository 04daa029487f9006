"""The cache of earlier texts: what they teach, in C++ and in Python, bounded, saved, and never more than a guess."""

import dataclasses
import json
import math
import random
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from medusa import MedusaModel, Speculation
from medusa.cpu import native
from medusa.drafters.continuations import SEARCH, Confidence
from medusa.drafters.ngram import FORMAT, NgramCache, NgramDrafter
from tests.medusa.states import decode_state
from tests.medusa.test_prompt_lookup import LANGUAGES, assert_same, drafted, state_of

TEXT = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 2, 3, 4, 5]


@pytest.fixture(params=LANGUAGES)
def language(request, monkeypatch):
    """Who keeps the tables and searches."""
    if request.param == "Python":
        monkeypatch.setattr(native, "available", lambda: False)
    return request.param


def taught(*texts, **options):
    cache = NgramCache(**options)
    cache.fill(texts)
    return cache


def likeliest(texts, text, nodes):
    """Paths with their log-probabilities by a plain definition: all of them that are likely enough for N nodes."""
    places = []
    for other in texts:
        for place in range(1, len(other)):
            match = 0
            while match < min(SEARCH.longest, place + 1, len(text)) and other[place - match] == text[-1 - match]:
                match += 1
            if match >= 2:
                places.append((match, other[place + 1 :]))
    places.sort(key=lambda pair: -pair[0])
    assert len(places) <= SEARCH.places, "otherwise the latest count"
    found, frontier = {}, [((), 0.0, places)]
    while frontier:
        above, score, here = frontier.pop()
        alike, depth = defaultdict(list), len(above)
        for match, after in here:
            if depth < len(after):
                alike[after[depth]].append((match, after))
        whole = sum(2**match for group in alike.values() for match, _ in group)
        for token, group in alike.items():
            part = SEARCH.shares * sum(2**match for match, _ in group) // whole
            longest = min(group[0][0] + depth, SEARCH.longest)
            probability = min((part + 0.5) / SEARCH.shares, 1) * longest / (longest + 1)
            if (worth := score + math.log(probability) - SEARCH.edge_cost) >= -math.log(nodes):
                found[*above, token] = worth
                frontier.append(((*above, token), worth, group))
    return found


def test_trees_hold_the_likeliest_continuations(base, language):
    draw, sizes = random.Random(0), []
    cases = [([[5, 6] * 10, [*range(20)]], [[6, 5, 6], [9, 10, 11], [3]])]
    for words in (2, 3, 5, 9):
        texts = [[draw.randrange(words) for _ in range(draw.randrange(1, 9))] for _ in range(12)]
        cases.append((texts, [*texts, [draw.randrange(words) for _ in range(30)]]))
    for texts, asked in cases:
        for text in asked:
            ours = drafted(NgramDrafter(taught(*texts), 8).propose(state_of([text], base)))
            every = likeliest(texts, text, 8)
            assert sorted(ours.values()) == pytest.approx(sorted(every.values(), reverse=True)[:7][::-1], abs=1e-5)
            assert all(score == pytest.approx(every[path], abs=1e-5) for path, score in ours.items())
            sizes.append(len(ours))
    assert 0 in sizes and 7 in sizes, "both must have been seen"


@pytest.mark.skipif(not native.available(), reason="no compiler")
@pytest.mark.parametrize("chain", [False, True])
def test_both_languages_keep_draft_and_learn_the_same(base, monkeypatch, chain):
    """Texts come in while two others grow; a small ring is written over again and again."""
    draw = random.Random(1)
    state = state_of([[draw.randrange(words) for _ in range(90)] for words in (3, 6)], base)
    caches = [NgramCache(100) for _ in range(2)]
    drafters = [NgramDrafter(cache, 9, chain) for cache in caches]
    sizes = set()
    for step in range(40):
        text = [draw.randrange(5) for _ in range(draw.randrange(20))]
        positions = torch.tensor([2 * step, 10 + step])
        roots = state.history.gather(1, positions[:, None])[:, 0]
        state = dataclasses.replace(state, positions=positions, roots=roots)
        drafts = []
        for cache, drafter, there in zip(caches, drafters, (True, False), strict=True):
            with monkeypatch.context() as patch:
                patch.setattr(native, "available", lambda there=there: there)
                cache.learn(text)
                drafts.append(drafter.propose(state))
        assert_same(*drafts)
        sizes.update(drafts[0].row_sizes)
    assert len(sizes) > 3
    assert len(caches[0]) == 128 < caches[0].tables.count
    for name in ("_ring", "_previous", "_latest"):
        assert torch.equal(getattr(caches[0], name), getattr(caches[1], name)), name
    for name in ("right", "tried"):
        ours, theirs = (getattr(cache.confidence, name) for cache in caches)
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, getattr(Confidence(SEARCH), name))


def test_texts_are_apart_and_the_oldest_are_written_over(base, language):
    cache = taught([1, 2, 3], [4, 5], capacity=64)
    assert drafted(NgramDrafter(cache, 8).propose(state_of([[9, 2, 3]], base))) == {}, "another text comes next"
    assert (3,) in drafted(NgramDrafter(cache, 8).propose(state_of([[1, 2]], base)))
    for number in range(20):
        cache.learn([30 + number, 31 + number, 32 + number])
    assert len(cache) == 64
    assert drafted(NgramDrafter(cache, 8).propose(state_of([[1, 2]], base))) == {}
    assert (51,) in drafted(NgramDrafter(cache, 8).propose(state_of([[49, 50]], base)))
    with pytest.raises(ValueError, match=r"capacity \(0\)"):
        NgramCache(0)


def test_a_saved_cache_is_read_back(base, tmp_path):
    cache = NgramCache()
    assert cache.fill([TEXT, [5, 6, 7]]) == len(TEXT) + 3
    cache.save(tmp_path / "some" / "ngrams.safetensors")
    again = NgramCache.load(tmp_path / "some" / "ngrams.safetensors")
    states = [state_of([text], base) for text in ([8, 2, 3, 4], [5, 6])]
    for state in states:
        ours, theirs = (drafted(NgramDrafter(one, 8).propose(state)) for one in (cache, again))
        assert ours == theirs != {}
    cache.fill([[7, 8]] * 30)
    cache.save(tmp_path / "some" / "ngrams.safetensors")
    few = NgramCache.load(tmp_path / "some" / "ngrams.safetensors", capacity=40)
    assert drafted(NgramDrafter(few, 8).propose(states[0])) == {}, "the latest are kept"
    assert (8,) not in drafted(NgramDrafter(few, 8).propose(state_of([[8, 7]], base)))
    assert len(few) == 64
    NgramCache().save(tmp_path / "empty")
    assert len(NgramCache.load(tmp_path / "empty")) <= 1
    (tmp_path / "broken").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="cannot be read"):
        NgramCache.load(tmp_path / "broken")
    with pytest.raises(ValueError, match="holds token 9, and the base has 9 tokens: it was saved with another base"):
        NgramCache.load(tmp_path / "some" / "ngrams.safetensors", vocab_size=9)
    with pytest.raises(FileNotFoundError):
        NgramCache.load(tmp_path / "missing")
    save_file({"texts": torch.zeros(3, 2)}, tmp_path / "odd", metadata={"format": FORMAT})
    with pytest.raises(ValueError, match="cannot be read: its tokens have another shape; save it again"):
        NgramCache.load(tmp_path / "odd")


def test_threads_may_share_a_cache(base, tmp_path):
    cache, interval = NgramCache(300), sys.getswitchinterval()
    drafter, state = NgramDrafter(cache, 16), state_of([[1, 2, 3, 4]], base)

    def teach(seed):
        draw = random.Random(seed)
        for _ in range(300):
            cache.learn([draw.randrange(6) for _ in range(30)])

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as pool:
            teaching = [pool.submit(teach, seed) for seed in range(3)]
            while not all(one.done() for one in teaching):
                drafter.propose(state)
                cache.save(tmp_path / "ngrams")
    finally:
        sys.setswitchinterval(interval)
    assert [one.result() for one in teaching] == [None] * 3
    again = NgramCache.load(tmp_path / "ngrams")
    assert drafted(NgramDrafter(again, 16).propose(state))


def test_rows_of_a_batch_draft_apart(base, language):
    rows = [[8, 2, 3, 4], [4], [9, 2]]
    drafter = NgramDrafter(taught(TEXT), 5)
    together = drafter.propose(state_of(rows, base))
    assert together.row_sizes[1] == 1
    for index, row in enumerate(rows):
        alone = NgramDrafter(taught(TEXT), 5).propose(state_of([row], base))
        assert drafted(together, index) == drafted(alone)
    with pytest.raises(ValueError, match="at least 2"):
        NgramDrafter(taught(TEXT), 1)


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


def test_guesses_of_other_texts_count_less_where_they_are_wrong(base, language):
    """What was found is judged by the text that follows, drafted or not, as long as its rows stay together."""
    drafter, text = NgramDrafter(taught([1, 2, 3, 4, 5, 6, 7, 8, 9]), 6), [1, 2, 3, 4]
    state = decode_state([text], base)

    def follow(token, times):
        for _ in range(times):
            state.history[0, 4] = token
            drafter.propose(dataclasses.replace(state, positions=state.positions + 1, roots=torch.tensor([token])))
            state.history[0, 4] = 0
            found = drafted(drafter.propose(state))
        return found

    sure = drafted(drafter.propose(state))
    assert (5, 6) in sure
    assert follow(9, 60) == {}, "the text says 9 where 5 was guessed"
    assert follow(5, 400)[5,] > sure[5,], "and comes back"
    other = dataclasses.replace(state, history=state.history.clone())
    before = drafter._search._confidence.tried.clone()
    drafter.propose(other)
    assert torch.equal(drafter._search._confidence.tried, before), "another batch"
