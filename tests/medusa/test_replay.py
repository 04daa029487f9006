"""Replays of known texts: the steps, the drafts and the counts of real decoding, with none of its passes."""

import pytest
import torch

from medusa import MedusaModel, Speculation
from medusa.acceptance import build_rule
from medusa.drafters import Drafter, HeadsDrafter
from medusa.drafters.choose import Drafters
from medusa.engine.replay import read, replay, tally
from medusa.tree import Tree
from tests.medusa.known_text import Chain, RandomTrees
from tests.medusa.test_model_drafter import pair
from tests.medusa.test_mtp import tiny as with_layer

PROMPTS = [[5, 9, 7, 5, 9, 7, 5, 9], [30, 2] * 20, [8, 8, 8, 3], [11] * 40, [8, 8, 8, 3]]


class Watched(Drafter):
    """Another drafter, and what it has drafted."""

    def __init__(self, drafter):
        self.drafter, self.nodes, self.observers, self.drafts = drafter, drafter.nodes, drafter.observers, []
        self.sees_base = drafter.sees_base

    def propose(self, state, sequences=()):
        draft = self.drafter.propose(state, sequences)
        self.drafts.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft


def compared(make, name, new_tokens, **options):
    """The steps and tokens of every text, of which real decoding and a replay have drafted the same trees.

    Drafters learn alike in both, from text to text.
    """
    real, known = make(), make()
    wanted, rule = Speculation(drafter=name, nodes=6), build_rule()
    ours, theirs = (Watched(model.drafters.choose(wanted, 1, rule)) for model in (known, real))
    for prompt in PROMPTS:
        output = real.generate(prompt, max_new_tokens=new_tokens, drafter=theirs, **options)
        text = read(known.base, known.base.new_pool(), prompt, output.tokens)
        counts = tally(text, replay(known.base, ours, text), 5)
        assert ours.drafts == theirs.drafts, (name, prompt)
        assert counts[:, 0].tolist() == [len(output.tokens), output.steps]
        for model in (real, known):
            model.drafters.observe(ours, wanted, rule, 1, prompt, output)
        yield output


@pytest.mark.parametrize("name", ["hybrid", "heads+ngram"])
def test_steps_are_those_of_generate(base, make_heads, name):
    found = list(compared(lambda: MedusaModel(base, make_heads()), name, 40))
    assert any(output.steps < len(output.tokens) for output in found), "some guesses are right"
    assert any(len(output.tokens) < 40 for output in found), "some texts end by themselves"


@pytest.mark.parametrize(
    ("name", "decoding", "fixed_shapes"),
    [("heads", "chain", False), ("hybrid", "tree", True), ("hybrid", "chain", True)],
)
def test_chains_and_fixed_shapes(base, make_heads, name, decoding, fixed_shapes):
    def make():
        model = MedusaModel(base.with_traits(decoding=decoding), make_heads())
        model.drafters = Drafters(model.base, model.heads, fixed_shapes)
        return model

    assert any(output.steps < len(output.tokens) for output in compared(make, name, 30))


def test_models_that_follow_the_base_follow_the_text():
    (base, small), name = pair("llama"), "draft-model+early-exit+prompt-lookup"
    found = list(compared(lambda: MedusaModel(base, draft_model=small), name, 20, ignore_eos=True))
    assert any(output.steps < len(output.tokens) for output in found)


def test_a_layer_of_the_base_sees_what_was_committed():
    base, _ = with_layer("glm4_moe")
    assert len(list(compared(lambda: MedusaModel(base), "mtp+early-exit", 20, ignore_eos=True))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("off", "steps", "right", "reached"), [(0, 3, [2, 2, 2, 1], [2, 2, 2, 1]), (1, 9, [0, 0, 0, 0], [8, 0, 0, 0])]
)
def test_counts_by_depth_end_with_the_text(base, off, steps, right, reached):
    ids = torch.arange(12).tolist()
    text = read(base, base.new_pool(), ids[:3], ids[3:])
    counts = tally(text, replay(base, Chain([ids], base.vocab_size, off), text), 4)
    assert counts.tolist() == [[9, *right], [steps, *reached]]


def test_every_place_is_drafted_for_once(base, make_heads):
    heads, ids = make_heads(), torch.randint(base.vocab_size, (30,), generator=torch.Generator().manual_seed(0))
    text = read(base, base.new_pool(), ids[:9].tolist(), ids[9:].tolist())
    drafter = HeadsDrafter(heads, base, 6, Tree.full([5]))
    steps = list(replay(base, drafter, text, every_place=True))
    assert [step.next for step in steps] == ids[10:].tolist()
    logits, _ = heads.level(0, heads.begin(text.hidden[8:-1], base), torch.zeros(20, 1).long(), ids[9:-1, None], base)
    order = logits[:, 0].argsort(-1, descending=True)
    ranks = [row.index(token) for row, token in zip(order.tolist(), ids[10:].tolist(), strict=True)]
    assert [step.rank for step in steps] == [rank if rank < 5 else None for rank in ranks]
    trees = list(replay(base, RandomTrees([ids.tolist()], base.vocab_size), text, every_place=True))
    assert [step.left for step in trees] == list(range(20, 0, -1))
    assert {step.accepted > 0 for step in trees} == {True, False}
    assert all((step.rank is not None) == (step.accepted > 0) for step in trees)


def test_tokens_that_the_base_would_not_say_are_counted(base, model):
    output = model.generate([5, 9, 7], max_new_tokens=20, ignore_eos=True)
    said, pool = output.tokens, base.new_pool()
    assert read(base, pool, [5, 9, 7], said).own(base) == 20
    said[19] = (said[19] + 1) % base.vocab_size
    assert read(base, pool, [5, 9, 7], said).own(base) == 19
