"""Drafters propose trees that hold what they promise."""

import dataclasses
import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from medusa import Draft, MedusaModel, Tree
from medusa.drafters import (
    Drafter,
    HeadsDrafter,
    HybridDrafter,
    PromptLookupDrafter,
    SampledHeadsDrafter,
)
from medusa.drafters.choose import KEPT_DRAFTERS
from medusa.drafters.heads import WIDTH
from medusa.drafters.merge import merge
from medusa.drafters.prompt_lookup import MAX_MATCH
from medusa.drafters.sampled import coin_tree
from medusa.engine import silence
from medusa.engine.step import fit
from medusa.sampling import Speculation
from medusa.state import DecodeState
from tests.medusa.kinds import MEMORYLESS
from tests.medusa.rules import make_rule
from tests.medusa.states import decode_state
from tests.medusa.trees import LOPSIDED


def unbounded(heads, base, nodes):
    """As on a GPU: every draft has its full size."""
    return HeadsDrafter(heads, base, nodes, host_decides=False)


def paths(draft, row=0):
    """Drafted paths as tuples of tokens, the root left out."""
    tokens, ancestors = draft.tokens[row], draft.ancestors[row]
    return [tuple(tokens[above].tolist()[1:]) for above in ancestors][1:]


@pytest.mark.parametrize("nodes", [8, 40, 80])
def test_on_a_cpu_unlikely_nodes_are_left_out(base, make_heads, monkeypatch, nodes):
    monkeypatch.setattr("medusa.drafters.heads.LEVEL_FLOOR", -math.inf)
    heads, state = make_heads(2), decode_state([[3]], base)
    full = paths(unbounded(heads, base, 80).propose(state))
    kept = paths(HeadsDrafter(heads, base, nodes).propose(state))

    def probability(path):
        features = heads(state.hidden, torch.tensor([[3, path[0]]]), base)
        steps = [heads.head_logits(k, features[k], base)[0].softmax(-1)[token].item() for k, token in enumerate(path)]
        return math.prod(steps)

    assert set(kept) == {path for path in full if probability(path) > 1 / nodes}


def test_on_a_cpu_no_level_follows_nodes_that_are_unlikely(base, make_heads, monkeypatch):
    state = decode_state([[3]], base)
    for floor, depth in ((-math.inf, 3), (0.0, 1)):
        monkeypatch.setattr("medusa.drafters.heads.LEVEL_FLOOR", floor)
        assert HeadsDrafter(make_heads(3), base, 10**6).propose(state).depth == depth


def test_finished_sequences_have_no_say(base, make_heads):
    drafter = HeadsDrafter(make_heads(3), base, 40)
    both = decode_state([[3], [1, 4]], base)
    for row in (0, 1):
        alone = DecodeState(*(getattr(both, field.name)[row : row + 1] for field in dataclasses.fields(both)))
        others = dataclasses.replace(both, active=torch.arange(2) == row)
        assert paths(drafter.propose(others), row) == paths(drafter.propose(alone))


@pytest.mark.parametrize("architecture", MEMORYLESS)
def test_dynamic_trees_hold_the_most_likely_paths(base, make_heads, architecture):
    """Against brute force: every path of the best tokens per level, scored by running the heads along it.

    With 64 nodes all of a root's 16 children may get children of their own.
    """
    heads, state = make_heads(2, architecture=architecture), decode_state([[3]], base)
    drafted = set(paths(unbounded(heads, base, 64).propose(state)))

    def logprobs(head, token):
        features = heads(state.hidden, torch.tensor([[3, token]]), base)
        return heads.head_logits(head, features[head], base)[0].log_softmax(-1)

    scores = {(a,): logprobs(0, 0)[a].item() for a in logprobs(0, 0).topk(WIDTH).indices.tolist()}
    for (a,), score in list(scores.items()):
        scores |= {(a, b): score + logprobs(1, a)[b].item() for b in logprobs(1, a).topk(WIDTH).indices.tolist()}
    best = sorted(scores, key=lambda path: scores[path] - 1e-4 * len(path), reverse=True)[:63]
    assert drafted == set(best)


def test_a_static_tree_takes_the_ranks_it_names(base, make_heads):
    heads = make_heads(3)
    state = decode_state([[3]], base)
    draft = HeadsDrafter(heads, base, nodes=1, tree=LOPSIDED).propose(state)
    assert draft.parents[0].tolist() == LOPSIDED.parents.tolist()
    tokens = dict(zip([(), *LOPSIDED.paths], draft.tokens[0].tolist(), strict=True))
    for path, token in tokens.items():
        if path:
            above = [tokens[path[:depth]] for depth in range(len(path))]
            features = heads(state.hidden, torch.tensor([above + [0] * (3 - len(above))]), base)
            logits = heads.head_logits(len(path) - 1, features[len(path) - 1], base)[0]
            assert logits.topk(6).indices[path[-1]] == token


@pytest.mark.parametrize("architecture", MEMORYLESS)
@pytest.mark.parametrize("tree", [LOPSIDED, coin_tree(9, 3, 4)], ids=["lopsided", "coin"])
def test_draws_come_from_the_heads_and_siblings_differ(base, make_heads, architecture, tree):
    """Row by row: the reported law is the heads' at the temperature, without what was drawn before."""
    heads, state = make_heads(3, architecture=architecture), decode_state([[3], [1, 4]], base, torch.tensor([5, 6]))
    draft = SampledHeadsDrafter(heads, base, 1, temperature=0.7, tree=tree).propose(state)
    assert draft.parents[1].tolist() == tree.parents.tolist()
    for row, node in ((row, node) for row in (0, 1) for node in range(1, tree.nodes)):
        above = draft.tokens[row, draft.ancestors[row, node]].tolist()[:-1]
        features = heads(state.hidden[row, None], torch.tensor([above + [0] * (3 - len(above))]), base)
        logits = heads.head_logits(len(above) - 1, features[len(above) - 1], base)[0] / 0.7
        law, rank = draft.probs[row, node], tree.paths[node - 1][-1]
        assert (law == 0).sum() == rank, "as many tokens are gone as were drawn before"
        elders = [n for n in range(1, node) if draft.parents[row, n] == draft.parents[row, node]]
        assert all(law[draft.tokens[row, elder]] == 0 for elder in elders)
        assert law[draft.tokens[row, node]] > 0
        torch.testing.assert_close(law, logits.softmax(-1).float() * (law > 0) / (logits.softmax(-1)[law > 0].sum()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_draws_of_heads_that_overflow_still_have_a_law(base, make_heads, value):
    heads = make_heads(3)
    heads.blocks[0].outer.weight.data *= value
    draft = SampledHeadsDrafter(heads, base, 12, temperature=1.0).propose(decode_state([[3]], base))
    torch.testing.assert_close(draft.probs[0, 1:].sum(-1), torch.ones(11))
    assert (draft.probs[0, torch.arange(1, 12), draft.tokens[0, 1:]] > 0).all()


def test_the_coin_tree_holds_the_likeliest_paths():
    for nodes, depth, width in ((2, 1, 1), (16, 5, 10), (64, 4, 10), (12, 2, 3), (500, 3, 3)):
        tree = coin_tree(nodes, depth, width)
        every = Tree.full([width] * depth).paths
        costs = sorted(len(path) + sum(path) for path in every)[: nodes - 1]
        assert sorted(len(path) + sum(path) for path in tree.paths) == costs


def test_drawn_and_chosen_drafts_join(base, make_heads):
    state = decode_state([[3]], base)
    drawn = SampledHeadsDrafter(make_heads(3), base, 4, temperature=1.0).propose(state)
    chosen = Fixed([3, 10, 11], [0, 0, 1], 2).propose(state)
    one_hot = torch.nn.functional.one_hot(torch.tensor([10, 11]), base.vocab_size).float()
    assert torch.equal(drawn.join(chosen).probs[0, 1:], torch.cat([drawn.probs[0, 1:], one_hot]))
    assert torch.equal(chosen.join(drawn).probs[0, 1:], torch.cat([one_hot, drawn.probs[0, 1:]]))
    assert chosen.join(chosen).probs is None


def looked_up(tokens, count):
    """What followed the longest match of at most MAX_MATCH tokens, the latest of several, in plain Python."""
    best = (0, -1)
    for place in range(len(tokens) - 1):
        match = 0
        while match < min(MAX_MATCH, place + 1) and tokens[place - match] == tokens[len(tokens) - 1 - match]:
            match += 1
        best = max(best, (match, place))
    if not best[0]:
        return []
    found = tokens[best[1] + 1 :]
    return [found[i % len(found)] for i in range(count)]


def test_where_shapes_are_fixed_the_latest_longest_match_goes_on(base):
    generator, hits = torch.Generator().manual_seed(0), []
    drafter = PromptLookupDrafter(6, host_decides=False)
    for vocabulary, length in product((1, 3, 6), range(1, 30)):
        lengths = [length, *torch.randint(1, length + 1, (2,), generator=generator).tolist()]
        rows = [torch.randint(vocabulary, (each,), generator=generator).tolist() for each in lengths]
        draft = drafter.propose(decode_state(rows, base))
        for row, tokens in enumerate(rows):
            expected = [tokens[-1], *looked_up(tokens, 5)]
            assert draft.tokens[row, : len(expected)].tolist() == expected
            hits.append(len(expected) > 1)
    assert 20 < sum(hits) < len(hits) - 20, "both cases must have been seen"


class Fixed(Drafter):
    """Proposes the same tree in every step."""

    def __init__(self, tokens, parents, depth):
        self.draft = Draft.of(torch.tensor([tokens]), torch.tensor([parents]), depth)
        self.nodes = len(tokens)

    def propose(self, state, cache=None):
        return self.draft


def test_a_cheap_drafter_that_expects_enough_leaves_out_the_dear_one(base):
    drafter = HybridDrafter([PromptLookupDrafter(5)], [Fixed([3, 10], [0, 0], 1)], 6)
    long, short = [1, 2, 9, 3, 7, 8, 1, 2, 9, 3], [1, 2, 9, 5, 3]
    assert drafter.propose(decode_state([long], base)).tokens[0].tolist() == [3, 7, 8, 1, 2]
    assert drafter.propose(decode_state([short], base)).tokens[0].tolist() == [3, 10]
    assert 10 in drafter.propose(decode_state([long, short], base)).tokens[0].tolist()


def test_equal_paths_are_merged_and_the_best_nodes_stay():
    heads = Draft.of(torch.tensor([[3, 10, 11, 12]]), torch.tensor([[0, 0, 1, 0]]), 2)
    heads = dataclasses.replace(heads, scores=torch.tensor([[0.0, -0.2, -0.9, -1.5]]))
    other = Draft.of(torch.tensor([[3, 10, 21, 22]]), torch.tensor([[0, 0, 1, 2]]), 3)
    other = dataclasses.replace(other, scores=torch.tensor([[0.0, -0.5, -0.6, -2.0]]))
    merged = merge([heads, other], 4)
    assert merged.tokens[0].tolist() == [3, 10, 11, 21]
    assert merged.parents[0].tolist() == [0, 0, 1, 1]
    assert merged.scores[0].tolist() == pytest.approx([0, -0.2, -0.9, -0.6])
    assert merge([heads, other], 9).tokens[0].tolist() == [3, 10, 11, 12, 21, 22]


def test_where_shapes_are_fixed_trees_stand_side_by_side(base):
    ours, theirs = Fixed([3, 10, 11, 12], [0, 0, 1, 0], 2), Fixed([3, 20, 21, 22], [0, 0, 1, 2], 3)
    ours.recordable = theirs.recordable = True
    drafter = HybridDrafter([theirs], [ours], 4)
    draft = drafter.propose(decode_state([[3]], base))
    assert drafter.nodes == 7
    assert draft.tokens[0].tolist() == [3, 10, 11, 12, 20, 21, 22]
    assert draft.parents[0].tolist() == [0, 0, 1, 0, 0, 4, 5]
    assert (draft.depth, draft.depths[0].tolist()) == (3, [0, 1, 2, 1, 1, 2, 3])


def test_drawn_chains_keep_their_laws_where_only_chains_are_verified():
    base, cache = SimpleNamespace(decoding="chain", context_length=100), [SimpleNamespace(length=95)]
    tokens, probs = torch.tensor([[1, 2, 3, 4, 5]]), torch.rand(1, 5, 9)
    drawn = fit(base, cache, Draft.of(tokens, torch.tensor([[0, 0, 1, 2, 3]]), 4, probs))
    assert drawn.tokens.tolist() == [[1, 2, 3, 4]], "as far as the context goes"
    assert torch.equal(drawn.probs, probs[:, :4])
    assert fit(base, cache, Draft.of(tokens, torch.tensor([[0, 0, 0, 2, 3]]), 3, probs)).probs is None, "a tree"


def test_wrong_drafters_are_refused(model, base):
    with pytest.raises(ValueError, match="choose one of: hybrid, heads, prompt-lookup"):
        model.generate("a", drafter="eagle")
    with pytest.raises(ValueError, match=r"drafter \(5\) is neither a name nor a Drafter"):
        model.generate("a", drafter=5)
    with pytest.raises(ValueError, match=r"tree \(\(\(0,\),\)\) is not a Tree"):
        model.generate("a", tree=((0,),))
    with pytest.raises(ValueError, match=r"speculation \('heads'\) must be of type Speculation"):
        model.generate("a", speculation="heads")
    with pytest.raises(ValueError, match="needs heads and there are none"):
        MedusaModel(base).generate("a", drafter="hybrid")
    with pytest.raises(ValueError, match=r"temperature \(0.0\) must be above 0 to draw"):
        model.generate("a", drafter="heads-sampled")
    with pytest.raises(ValueError, match="needs heads and there are none"):
        MedusaModel(base).generate("a", drafter="heads-sampled", temperature=1.0)
    with pytest.raises(ValueError, match="exceeds the number of heads"):
        model.generate("a", drafter="heads-sampled", temperature=1.0, tree=Tree.chain(4))
    with pytest.raises(ValueError, match="at least 2 for prompt lookup"):
        PromptLookupDrafter(1)


def test_a_drafter_that_was_named_and_drafts_nothing_says_why(base, make_heads, caplog):
    heads = make_heads(own_lm_heads=True)
    heads.lm_heads.data.zero_()  # all tokens are equally likely, and none of them likely
    silence._say.cache_clear()
    model = MedusaModel(base, heads)
    with caplog.at_level("WARNING", "medusa"):
        for _ in range(2):
            assert model.generate("abc", drafter="heads", nodes=8, max_new_tokens=20, ignore_eos=True).draft_tokens == 0
        model.generate("abc", drafter="heads", nodes=1, max_new_tokens=20, ignore_eos=True)
        MedusaModel(base, make_heads()).generate("abc", drafter="heads", nodes=8, max_new_tokens=20, ignore_eos=True)
    assert [message for message in caplog.messages if "drafted nothing" in message] == [
        f"drafter 'heads' drafted nothing, so decoding was plain: {silence.REASONS['heads']}"
    ]


def test_drafters_of_many_temperatures_do_not_pile_up(base, make_heads):
    """Each temperature of drawn drafts is another drafter; an interface with a slider tries hundreds."""
    model = MedusaModel(base, make_heads())

    def drafter(temperature, nodes=None):
        drafting = Speculation(drafter="heads-sampled", nodes=nodes)
        return model.drafters.choose(drafting, 1, make_rule(None, temperature=temperature))

    kept = drafter(0.5, nodes=4)
    for number in range(KEPT_DRAFTERS + 9):
        drafter(0.6 + number / 1000)
        assert drafter(0.5, nodes=4) is kept, "what is used stays"
    assert len(model.drafters._kept) == KEPT_DRAFTERS
    output = model.generate([5, 6, 7], max_new_tokens=12, drafter="heads-sampled", temperature=0.7)
    assert len(output.tokens) == 12
