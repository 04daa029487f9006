import math

import pytest
import torch
from transformers import TopPLogitsWarper

from medusa.acceptance import Verdict, select_path
from medusa.acceptance.logits import LARGE, LIKELIEST, nucleus
from medusa.noise import DRAFT, TEXT, gumbel_noise, uniform_noise
from medusa.tree import Draft, Tree
from tests.medusa.rules import make_rule
from tests.medusa.states import state_at


def draft_of(tree, tokens):
    return Draft.of(torch.tensor([tokens]), tree.parents[None], tree.depth)


def test_the_deepest_path_of_accepted_edges_wins():
    # Node 3 stands below node 1, and node 4 below node 3; node 2 is node 1's sibling.
    tree = Tree(((0,), (1,), (0, 0), (0, 0, 0)))
    draft = draft_of(tree, [9, 1, 2, 3, 4])
    verdict = Verdict(torch.tensor([[False, True, True, True, False]]), torch.tensor([[50, 51, 52, 53, 54]]))
    accepted = select_path(draft, verdict)
    assert accepted.path.tolist() == [[0, 1, 3, 3]]
    assert accepted.counts.tolist() == [3]
    assert accepted.tokens[0, :3].tolist() == [1, 3, 53]
    assert (accepted.leaf.item(), accepted.bonus.item()) == (3, 53)


def test_among_equally_deep_paths_the_likelier_wins():
    draft = draft_of(Tree(((0,), (1,))), [9, 1, 2])
    likelihood = torch.tensor([[-100.0, math.log(0.2), math.log(0.3)]])
    accepted = select_path(draft, Verdict(torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3).long(), likelihood))
    assert accepted.leaf.tolist() == [2]


@pytest.mark.parametrize(
    ("probabilities", "entropy"),
    [
        ([0.5, 0.5, 0.0, 0.0], math.log(2)),
        ([0.25, 0.25, 0.25, 0.25], math.log(4)),
        ([0.7, 0.1, 0.1, 0.1], 0.9404479886553263),
        ([0.97, 0.01, 0.01, 0.01], 0.16770086119176325),
    ],
)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 0.5), (1.0, 0.9)])
def test_typical_acceptance_on_hand_computed_entropies(probabilities, entropy, epsilon, delta):
    rule = make_rule("typical", temperature=1.0, epsilon=epsilon, delta=delta)
    threshold = min(epsilon, delta * math.exp(-entropy))
    logits = torch.tensor(probabilities).log().expand(1, 5, 4)
    draft = draft_of(Tree.full([4]), [0, 0, 1, 2, 3])
    edges = rule(draft, logits, state_at([0])).edges[0, 1:].tolist()
    assert edges == [p > threshold for p in probabilities]


def test_typical_reads_the_distribution_at_temperature():
    logits = torch.tensor([0.6, 0.3, 0.1]).log().expand(1, 2, 3)
    draft = draft_of(Tree.chain(1), [0, 2])
    flat = make_rule("typical", temperature=10.0, epsilon=0.2, delta=10.0)
    sharp = make_rule("typical", temperature=1.0, epsilon=0.2, delta=10.0)
    assert flat(draft, logits, state_at([0])).edges[0, 1]
    assert not sharp(draft, logits, state_at([0])).edges[0, 1]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40 + 3])
def test_noise_is_standard_gumbel_for_every_seed(seed):
    noise = gumbel_noise(torch.tensor([seed]), torch.arange(64)[None], 512)
    uniform = torch.exp(-torch.exp(-noise.flatten().double())).sort().values
    expected = (torch.arange(len(uniform)) + 0.5) / len(uniform)
    assert (uniform - expected).abs().max() * len(uniform) ** 0.5 < 1.95, "Kolmogorov-Smirnov, p < 0.001"
    assert gumbel_noise(torch.tensor([seed]), torch.arange(2000)[None], 512).isfinite().all()
    winners = noise[0].argmax(-1)
    assert (winners == torch.arange(64)).sum() < 4, "the winner must not depend on the position's number"
    assert len(winners.unique()) > 50


def test_noise_differs_between_seeds_and_positions_and_repeats_exactly():
    positions = torch.tensor([[3, 4]])
    first = gumbel_noise(torch.tensor([1]), positions, 256)
    assert torch.equal(first, gumbel_noise(torch.tensor([1]), positions, 256))
    assert abs(torch.corrcoef(first[0])[0, 1]) < 0.25
    other = gumbel_noise(torch.tensor([2]), positions, 256)
    assert abs(torch.corrcoef(torch.stack([first[0, 0], other[0, 0]]))[0, 1]) < 0.25


def test_streams_of_noise_are_independent():
    seeds, positions = torch.tensor([3]), torch.arange(8)[None]
    tokens = torch.arange(4096).expand(8, -1).T
    noise = [torch.exp(-torch.exp(-gumbel_noise(seeds, positions, 4096, stream)))[0] for stream in (TEXT, DRAFT)]
    chance = uniform_noise(seeds.expand(4096), positions.expand(4096, -1), tokens).T
    assert abs(chance.mean() - 0.5) < 0.01
    streams = torch.stack([*noise, chance]).flatten(1)
    assert (torch.corrcoef(streams) - torch.eye(3)).abs().max() < 0.02


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}])
def test_filters_leave_out_what_transformers_leaves_out(options):
    rule = make_rule("sampling", temperature=1.0, **options)
    logits = torch.tensor([0.4, 0.35, 0.15, 0.1]).log().expand(1, 1, 4)
    draft = Draft.chain(torch.zeros(1, 1).long())
    seen = {rule(draft, logits, state_at([position])).bonus.item() for position in range(200)}
    assert seen == {0, 1}


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999])
def test_a_nucleus_among_the_likeliest_tokens_is_that_of_the_whole_vocabulary(top_p):
    spreads = torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0, 100.0], dtype=torch.float64)
    scores = torch.randn(6, LARGE, generator=torch.Generator().manual_seed(0)).double() * spreads[:, None]
    scores[2, LIKELIEST // 2 :] = -math.inf  # as top-k leaves it
    found = nucleus(scores, top_p)
    expected = TopPLogitsWarper(top_p)(None, scores)
    assert torch.equal(found[1:], expected[1:])
    assert found[0].isfinite().all(), "equal tokens stay together"
    alone = torch.cat([nucleus(row[None], top_p) for row in scores.float()])
    assert torch.equal(nucleus(scores.float(), top_p), alone), "a row does not depend on others"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("magic", {}, "not known; choose one of: greedy, sampling, speculative, typical"),
        ("typical", {"temperature": 0.0}, "greedy needs 0"),
        ("greedy", {"temperature": 1.0}, "greedy needs 0"),
        (None, {"temperature": -1.0}, "temperature"),
        (None, {"temperature": 1.0, "top_p": 1.5}, "top_p"),
        (None, {"temperature": 1.0, "top_p": 0.0}, "leaves no token"),
        (None, {"temperature": 1.0, "top_p": 1e-50}, r"top_p .1e-50. must be at least 1.18e-38"),
        (None, {"temperature": 1e-50}, r"temperature .1e-50. must be at least"),
        ("typical", {"temperature": 1.0, "epsilon": 2.0}, "epsilon"),
        ("speculative", {"temperature": 0.0}, "greedy needs 0"),
        (None, {"repetition_penalty": 0.0}, "repetition_penalty .0.0. must be a number above 0"),
        (None, {"repetition_penalty": math.nan}, "repetition_penalty"),
        (None, {"logit_bias": {5: 1.0, 6: 101.0}}, "logit_bias of token 6 .101.0. must be between"),
        (None, {"logit_bias": {5: math.nan}}, "logit_bias of token 5"),
        (None, {"logit_bias": [5]}, r"logit_bias .\[5\]. must be a mapping"),
        (None, {"stop": [1]}, r"stop .\[1\]. must be a string, or a list of strings"),
        (None, {"repetition_penalty": "1"}, "repetition_penalty .'1'. must be a number"),
    ],
)
def test_wrong_settings_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_rule(name, **options)
