"""Replays of known texts: the steps, the drafts and the counts of real decoding, with none of its passes."""

import pytest

from medusa import MedusaModel, Speculation
from medusa.acceptance import build_rule
from medusa.drafters import Drafter
from medusa.engine.replay import read, replay, tally
from tests.medusa.test_model_drafter import pair
from tests.medusa.test_mtp import tiny as with_layer

PROMPTS = [[5, 9, 7, 5, 9, 7, 5, 9], [30, 2] * 20, [8, 8, 8, 3], [11] * 40, [8, 8, 8, 3]]
OTHERS = ("draft-model", "early-exit", "draft-model+early-exit+prompt-lookup")


class Watched(Drafter):
    """Another drafter, and what it has drafted."""

    def __init__(self, drafter):
        self.drafter, self.nodes, self.drafts = drafter, drafter.nodes, []

    def propose(self, state, sequences=()):
        draft = self.drafter.propose(state, sequences)
        self.drafts.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft


def compared(make, name, new_tokens=70, **options):
    """The steps and tokens of every text, of which real decoding and a replay have drafted the same trees.

    Drafters learn alike in both, from text to text.
    """
    real, known = make(), make()
    wanted, rule = Speculation(drafter=name, nodes=6), build_rule()
    ours, theirs = (Watched(model.drafters.choose(wanted, 1, rule)) for model in (known, real))
    for prompt in PROMPTS:
        output = real.generate(prompt, max_new_tokens=new_tokens, drafter=theirs, **options)
        text = read(known.base, known.base.new_pool(), prompt, output.tokens)
        counts = tally(text, replay(known.base, ours, text, cached="early-exit" in name), 5)
        assert ours.drafts == theirs.drafts, (name, prompt)
        assert counts[:, 0].tolist() == [len(output.tokens), output.steps]
        for model in (real, known):
            model.drafters.observe(ours, wanted, rule, 1, prompt, output)
        yield output


@pytest.mark.parametrize("name", ["heads", "prompt-lookup", "ngram", "hybrid", "heads+ngram"])
def test_steps_are_those_of_generate(base, make_heads, name):
    found = list(compared(lambda: MedusaModel(base, make_heads()), name))
    assert any(output.steps < len(output.tokens) for output in found), "some guesses are right"
    assert any(len(output.tokens) < 70 for output in found), "some texts end by themselves"


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_follow_the_base_follow_the_text(name):
    base, small = pair("llama")
    found = list(compared(lambda: MedusaModel(base, draft_model=small), name, ignore_eos=True))
    assert any(output.steps < len(output.tokens) for output in found)


@pytest.mark.parametrize("name", ["mtp", "mtp+prompt-lookup", "mtp+early-exit"])
def test_a_layer_of_the_base_sees_what_was_committed(name):
    base, _ = with_layer("glm4_moe")
    assert len(list(compared(lambda: MedusaModel(base), name, new_tokens=20, ignore_eos=True))) == len(PROMPTS)
