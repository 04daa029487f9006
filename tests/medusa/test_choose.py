"""The drafters of requests: which may be chosen by their speed, and what they learn from."""

from medusa import BaseModel, MedusaModel
from medusa.acceptance import build_rule
from medusa.budget.policy import PLAIN
from medusa.drafters.build import is_drawn
from medusa.drafters.ngram import ORDERS
from medusa.sampling import SamplingParams, Speculation


def test_drafts_that_change_the_text_are_not_chosen_by_speed(base, make_heads):
    small = BaseModel(base.model, base.tokenizer, base.name)
    drafters = MedusaModel(base, make_heads(), draft_model=small).drafters
    wanted = Speculation(acceptance="speculative")
    rule = build_rule(SamplingParams(temperature=1.0), wanted)
    found = drafters.choices(wanted, 1, rule)
    assert found and not any(is_drawn(name, rule.name) for name in found), found


def test_a_batch_has_a_policy_of_its_own_which_begins_with_fewer_nodes(base, make_heads):
    drafters, rule = MedusaModel(base, make_heads()).drafters, build_rule()
    for batch in (1, 3, 4, 64):
        drafters.choose(Speculation(), batch, rule)
    begins = {slots: policy.arm.nodes for (*_, slots), policy in drafters._policies.items()}
    assert begins == {1: 4, 4: 2, 64: PLAIN.nodes}, begins


def test_what_followed_the_end_of_a_prompt_is_learned(base, make_heads):
    model = MedusaModel(base, make_heads())
    prompt = list(range(3, 23))
    first = model.generate(prompt, max_new_tokens=6, ignore_eos=True, drafter="ngram").tokens
    again = MedusaModel(base, make_heads())
    again.ngrams.learn([*prompt[-max(ORDERS) :], *first])
    assert len(model.ngrams) == len(again.ngrams)
