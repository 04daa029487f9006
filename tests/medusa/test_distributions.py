"""Lossless by enumeration: the exact law of what a step emits, all outcomes of its random numbers integrated.

The base is a table: p(a), p(b | a), p(c | a, b) over a few tokens. Drafts have depth 2 at most, so the law of three
tokens says everything; where a step emits fewer, the table goes on. Rules and ``select_path`` are those that decode;
only their random numbers are injected.
"""

import dataclasses
import itertools

import pytest
import torch

from medusa.acceptance import rules, select_path
from medusa.acceptance.rejection import rejection_chances
from medusa.tree import Draft
from tests.medusa.biased import forgetful, generous
from tests.medusa.rules import make_rule
from tests.medusa.states import state_at

V = 4
TREES = [[0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1, 2], [0, 0, 0, 1, 1]]
"""Parents of each node; the root is its own."""


@pytest.fixture
def base():
    """[V], [V, V], [V, V, V] conditional laws of the first, second and third token; some tokens never come."""
    generator = torch.Generator().manual_seed(0)
    table = [torch.rand(*[V] * n, generator=generator, dtype=torch.float64).pow(3) for n in (1, 2, 3)]
    table[0][1] = table[1][2, 3] = 0
    return [weights / weights.sum(-1, keepdim=True) for weights in table]


def target_probs(base, draft):
    """[B, N, V] the base's law after each node."""
    above = draft.tokens.gather(1, draft.parents)
    by_depth = [base[0].expand(*draft.tokens.shape, -1), base[1][draft.tokens], base[2][above, draft.tokens]]
    return torch.stack(by_depth).gather(0, draft.depths[None, ..., None].expand(1, -1, -1, V))[0]


def drawn_drafts(parents, kinds):
    """All outcomes of drawing a tree as one batch: the draft with its laws, and the probability of each outcome.

    Kinds of a node: "drawn" (without the tokens of elder siblings), "again" (with them), "fixed" (always one token).
    """
    generator = torch.Generator().manual_seed(1)
    outcomes = torch.tensor(list(itertools.product(range(V), repeat=len(parents) - 1)))
    tokens = torch.cat([torch.zeros(len(outcomes), 1, dtype=torch.int64), outcomes], dim=1)
    weights = torch.ones(len(tokens), dtype=torch.float64)
    laws = [torch.zeros(len(tokens), V, dtype=torch.float64)]
    for node, (parent, kind) in enumerate(zip(parents[1:], kinds, strict=True), start=1):
        given = torch.rand(V, V, generator=generator, dtype=torch.float64).pow(2)[tokens[:, parent]]
        if kind == "fixed":
            given = torch.eye(V, dtype=torch.float64)[torch.randint(V, (1,), generator=generator)].expand_as(given)
        for elder in range(1, node):
            if kind == "drawn" and parents[elder] == parent:
                given = given.scatter(1, tokens[:, elder, None], 0.0)
        laws.append(given / given.sum(-1, keepdim=True))
        weights = weights * laws[-1].gather(1, tokens[:, node, None])[:, 0]
    draft = Draft.of(tokens, torch.tensor(parents).expand_as(tokens), 2, torch.stack(laws, dim=1))
    possible = weights > 0
    fields = (draft.tokens[possible], draft.parents[possible], draft.depth, draft.probs[possible])
    return Draft(*fields), weights[possible]


def add_emitted(law, base, accepted, weights):
    """Add one outcome per sequence to the law [V, V, V] of three tokens; the base goes on where fewer were emitted."""
    tokens, counts = accepted.tokens, accepted.counts
    first = tokens[:, 0]
    second = torch.eye(V, dtype=law.dtype)[tokens[:, min(1, tokens.shape[1] - 1)]]
    second = torch.where(counts[:, None] > 1, second, base[1][first])
    third = torch.eye(V, dtype=law.dtype)[tokens[:, min(2, tokens.shape[1] - 1)]]
    third = torch.where(counts[:, None, None] > 2, third[:, None], base[2][first])
    law.index_add_(0, first, weights[:, None, None] * second[:, :, None] * third)


def error(law, base):
    return (law - base[0][:, None, None] * base[1][:, :, None] * base[2]).abs().max().item()


def speculative_error(base, monkeypatch, draft, weights, chances=rejection_chances):
    """Largest error of the law under the rule: every pattern of chances taken or missed, and every bonus token."""
    rows, now = torch.arange(len(weights)), {}

    def spy(*arguments):
        now["chances"], left = chances(*arguments)
        return now["chances"], left

    def draw(_draft, logits, *_):
        now["left"] = logits.exp()
        return torch.full_like(draft.tokens, now["bonus"])

    monkeypatch.setattr(rules, "rejection_chances", spy)
    monkeypatch.setattr(rules, "uniform_noise", lambda *_: now["uniform"].expand(len(rows), -1))
    monkeypatch.setattr(rules, "_draw", draw)
    rule = make_rule("speculative", temperature=1.0)
    law, logits = torch.zeros(V, V, V, dtype=torch.float64), target_probs(base, draft).log()
    for *missed, now["bonus"] in itertools.product(*[[0.0, 1.0]] * (draft.tokens.shape[1] - 1), range(V)):
        now["uniform"] = torch.tensor([0.0, *missed], dtype=torch.float64)
        accepted = select_path(draft, rule(draft, logits, state_at(rows)))
        taken = torch.where(now["uniform"] == 0, now["chances"], 1 - now["chances"])[:, 1:].prod(-1)
        add_emitted(law, base, accepted, weights * taken * now["left"][rows, accepted.leaf, now["bonus"]])
    return error(law, base)


@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("kind", ["drawn", "again", "fixed", "mixed"])
def test_speculative_has_the_law_of_the_base(base, monkeypatch, parents, kind):
    mixed = itertools.cycle(["drawn", "fixed", "again", "drawn"])
    kinds = [kind if kind != "mixed" else next(mixed) for _ in parents[1:]]
    assert speculative_error(base, monkeypatch, *drawn_drafts(parents, kinds)) < 1e-12


def test_what_fills_a_small_tree_up_is_never_tried(base, monkeypatch):
    draft, weights = drawn_drafts([0, 0, 0, 1], ["drawn", "fixed", "drawn"])
    twice = [torch.cat([part, part]) for part in (draft.tokens, draft.parents, draft.probs)]
    small = Draft(*twice[:2], draft.depth, twice[2], sizes=[4] * len(weights) + [3] * len(weights))
    halves = torch.cat([weights, weights]) / 2
    assert speculative_error(base, monkeypatch, small, halves) < 1e-12

    def blind(draft, *probs):
        return rejection_chances(dataclasses.replace(draft, sizes=None), *probs)

    assert speculative_error(base, monkeypatch, small, halves, blind) > 1e-3


@pytest.mark.parametrize("biased", [generous, forgetful])
def test_the_enumeration_sees_a_wrong_rule(base, monkeypatch, biased):
    drafts = drawn_drafts([0, 0, 0, 1], ["drawn"] * 3)
    assert speculative_error(base, monkeypatch, *drafts, biased) > 1e-3


def sampling_error(base, monkeypatch, parents, tokens, shared=True):
    """Largest error of the law under the rule: every joint outcome of one draw per node, for a tree that is fixed.

    Nodes with the same path share their draw, as they share their noise; not so if ``shared`` is false.
    """
    outcomes = torch.tensor(list(itertools.product(range(V), repeat=len(parents))))
    draft = Draft.of(tokens.expand_as(outcomes), torch.tensor(parents).expand_as(outcomes), 2)
    target = target_probs(base, draft)
    factors = target.gather(2, outcomes[..., None])[..., 0]
    paths = [tuple(tokens[above].tolist()) for above in draft.ancestors[0]]
    for node, path in enumerate(paths):
        if shared and path in paths[:node]:
            factors[:, node] = (outcomes[:, node] == outcomes[:, paths.index(path)]).double()
    monkeypatch.setattr(rules, "_draw", lambda *_: outcomes)
    rule = make_rule("sampling", temperature=1.0)
    law = torch.zeros(V, V, V, dtype=torch.float64)
    accepted = select_path(draft, rule(draft, target.log(), state_at(torch.arange(len(outcomes)))))
    add_emitted(law, base, accepted, factors.prod(-1))
    return error(law, base)


@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("choice", range(3))
def test_sampling_has_the_law_of_the_base(base, monkeypatch, parents, choice):
    tokens = torch.randint(V, (len(parents),), generator=torch.Generator().manual_seed(choice))
    assert sampling_error(base, monkeypatch, parents, tokens) < 1e-12


def test_equal_paths_must_share_their_draw_and_do(base, monkeypatch):
    """Two siblings with one token: with draws of their own the deeper of two paths would win, which is a bias."""
    parents, tokens = [0, 0, 0, 1, 2], torch.tensor([0, 3, 3, 0, 2])
    logits = torch.zeros(64, 5, V)
    draft = Draft.of(tokens.expand(64, -1), torch.tensor(parents).expand(64, -1), 2)
    bonus = make_rule("sampling", temperature=1.0)(draft, logits, state_at([5] * 64, torch.arange(64))).bonus
    assert torch.equal(bonus[:, 1], bonus[:, 2])
    assert len(bonus[:, 1].unique()) == V
    assert sampling_error(base, monkeypatch, parents, tokens) < 1e-12
    assert sampling_error(base, monkeypatch, parents, tokens, shared=False) > 1e-3
