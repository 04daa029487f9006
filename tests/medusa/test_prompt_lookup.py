"""Prompt lookup on a CPU: its trees by a plain definition, in C++ and in Python, and what it learns."""

import dataclasses
import math
import random
from collections import defaultdict

import pytest
import torch

from medusa.cpu import native
from medusa.drafters import PromptLookupDrafter
from medusa.drafters.continuations import Confidence
from medusa.drafters.prompt_lookup import SEARCH
from tests.medusa.states import decode_state

LANGUAGES = [pytest.param("C++", marks=pytest.mark.skipif(not native.available(), reason="no compiler")), "Python"]


@pytest.fixture(params=LANGUAGES)
def language(request, monkeypatch):
    """Who searches."""
    if request.param == "Python":
        monkeypatch.setattr(native, "reads_indices", lambda *tensors: False)
    return request.param


def texts():
    """Texts that are hard to search: of few words, of one, repeated, without a repetition, and of one token."""
    draw = random.Random(0)
    several = [[draw.randrange(words) for _ in range(length)] for words in (1, 2, 3, 8) for length in range(1, 26)]
    return [*several, [7] * 90, [*range(20)] * 4, list(range(90)), [5, 6, 5, 6, 7] * 8]


def matches(text):
    """Places and how many tokens agree there with the end of the text, the best first."""
    found = []
    for place in range(len(text) - 1):
        match = 0
        while match < min(SEARCH.longest, place + 1) and text[place - match] == text[len(text) - 1 - match]:
            match += 1
        if match:
            found.append((match, place))
    return sorted(found, reverse=True)[: SEARCH.places]


def worth(text, above):
    """Every token after a drafted path, with the probability that its place's continuations give it at first."""
    weights, longest = defaultdict(int), {}
    for match, place in matches(text):
        after = text[place + 1 :]
        continued = [after[index % len(after)] for index in range(len(above) + 1)]
        if continued[:-1] == above:
            weights[continued[-1]] += 2**match
            longest[continued[-1]] = max(longest.get(continued[-1], 0), min(match + len(above), SEARCH.longest))
    parts = {token: SEARCH.shares * weight // sum(weights.values()) for token, weight in weights.items()}
    shares = {token: min((part + 0.5) / SEARCH.shares, 1) for token, part in parts.items()}
    return {token: share * longest[token] / (longest[token] + 1) for token, share in shares.items()}


def likeliest(text, nodes, most=None):
    """Paths with their log-probabilities: the best of all that are likely enough for a tree of N nodes."""
    found, frontier = {}, [((), 0.0)]
    while frontier:
        above, score = frontier.pop()
        for token, probability in worth(text, list(above)).items():
            here = score + math.log(probability) - SEARCH.edge_cost
            if here >= -math.log(nodes):
                found[*above, token] = here
                frontier.append(((*above, token), here))
    return dict(sorted(found.items(), key=lambda pair: -pair[1])[: (most or nodes) - 1])


def drafted(draft, row=0):
    """Paths of a draft's nodes with their scores, the root left out."""
    paths = [()]
    for node in range(1, draft.row_sizes[row]):
        paths.append((*paths[draft.parents[row, node]], int(draft.tokens[row, node])))
    return {} if draft.scores is None else dict(zip(paths[1:], draft.scores[row].tolist()[1:], strict=False))


def state_of(rows, base):
    state = decode_state([row[:1] for row in rows], base)
    history = torch.tensor([row + [0] * (100 - len(row)) for row in rows])
    positions = torch.tensor([len(row) - 1 for row in rows])
    roots = torch.tensor([row[-1] for row in rows])
    return dataclasses.replace(state, history=history, positions=positions, roots=roots)


def test_trees_hold_the_likeliest_continuations(base, language):
    guesses = []
    for text in texts():
        # Equally likely guesses may change places: as many of the same worth.
        ours, theirs = (drafted(PromptLookupDrafter(8).propose(state_of([text], base))), likeliest(text, 8))
        assert sorted(ours.values()) == pytest.approx(sorted(theirs.values()), abs=1e-5)
        every = likeliest(text, 8, 10**6)
        assert all(score == pytest.approx(every[path], abs=1e-5) for path, score in ours.items())
        guesses.append(len(ours))
    assert 0 in guesses and 7 in guesses, "both must have been seen"


def assert_same(ours, theirs):
    """Two drafts are equal, their scores too."""
    assert ours.row_sizes == theirs.row_sizes
    assert ours.depth == theirs.depth
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.parents, theirs.parents)
    assert ours.scores is None or torch.equal(ours.scores, theirs.scores)


@pytest.mark.skipif(not native.available(), reason="no compiler")
@pytest.mark.parametrize("chain", [False, True])
def test_both_languages_draft_and_learn_the_same(base, monkeypatch, chain):
    """Three texts grow by the step; one of them ends on the way."""
    draw = random.Random(1)
    state = state_of([[draw.randrange(words) for _ in range(90)] for words in (2, 4, 9)], base)
    both = [PromptLookupDrafter(9, chain=chain) for _ in range(2)]
    for step in range(25):
        positions = torch.tensor([3 * step, 10 + 2 * step, 40 + step])
        roots = state.history.gather(1, positions[:, None])[:, 0]
        state = dataclasses.replace(state, positions=positions, roots=roots)
        state.active[1] = step < 15
        ours = both[0].propose(state)
        with monkeypatch.context() as patch:
            patch.setattr(native, "reads_indices", lambda *tensors: False)
            theirs = both[1].propose(state)
        assert_same(ours, theirs)
        assert ours.row_sizes[1] == 1 or state.active[1]
        if chain:
            assert ours.depth == ours.tokens.shape[1] - 1
    confidences = [drafter._confidence for drafter in both]
    assert torch.equal(confidences[0].right, confidences[1].right)
    assert torch.equal(confidences[0].tried, confidences[1].tried)
    assert not torch.equal(confidences[0].right, Confidence(SEARCH).right)


def test_rows_do_not_know_each_other(base, language):
    rows = [[5, 6, 7, 5, 6], [1, 2, 3], [9] * 40]
    together = PromptLookupDrafter(6).propose(state_of(rows, base))
    for index, row in enumerate(rows):
        alone = PromptLookupDrafter(6).propose(state_of([row], base))
        assert together.tokens[index, : together.row_sizes[index]].tolist() == alone.tokens[0].tolist()
        assert drafted(together, index) == drafted(alone)


def test_guesses_that_are_unlikely_are_left_out(base, language):
    for belief, guesses in ((0.99, 7), (0.5, 2), (0.2, 1), (0.05, 0)):
        confidence = Confidence(SEARCH)
        confidence.right = belief * confidence.tried
        drafter = PromptLookupDrafter(8, confidence=confidence)
        assert drafter.propose(state_of([[1, 2, 3, 4, 5, 1, 2]], base)).tokens.shape[1] == 1 + guesses


def test_what_guesses_are_worth_is_learned_even_while_none_is_drafted(base, language):
    """After 1 2 came 3; for a while 9 comes instead, then 3 again."""
    drafter, sizes = PromptLookupDrafter(2), []
    for came in [9] * 40 + [3] * 40:
        state = state_of([[1, 2, 3, 8, 1, 2]], base)
        sizes.append(drafter.propose(state).tokens.shape[1])
        state.history[0, 6] = came
        drafter.propose(dataclasses.replace(state, positions=state.positions + 1, roots=torch.tensor([came])))
    assert sizes[0] == 2
    assert sizes[40] == 1, "not worth a row any more"
    assert sizes[-1] == 2, "worth it again"
