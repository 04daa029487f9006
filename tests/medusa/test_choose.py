"""The drafters of requests: which may be chosen by their speed, and what they learn from."""

from medusa import BaseModel, MedusaModel
from medusa.acceptance import build_rule
from medusa.budget.policy import PLAIN
from medusa.drafters.build import is_drawn
from medusa.drafters.continuations import SEARCH
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
    again.ngrams.learn([*prompt[-SEARCH.longest :], *first])
    assert len(model.ngrams) == len(again.ngrams)


def test_who_remembers_drafts_from_what_was_completed_before_and_others_do_not(base, make_heads):
    model, options = MedusaModel(base, make_heads()), {"max_new_tokens": 40, "ignore_eos": True}
    assert not any("ngram" in name for name in model.drafters.choices())
    first = model.generate([5, 6, 7], **options)
    assert len(model.ngrams) == 0
    model.drafters.remembering = True
    assert set(model.drafters.choices()) == {"hybrid+ngram", "prompt-lookup+ngram"}
    assert set(model.drafters.choices(batch=4)) == {"hybrid+ngram"}
    model.generate([5, 6, 7], **options)
    known = len(model.ngrams)
    assert known > 40
    again = model.generate([5, 6, 7], nodes=8, **options)
    assert len(model.ngrams) > known
    assert again.tokens == first.tokens
    assert again.steps < first.steps / 2
    known = len(model.ngrams)
    model.generate([5, 6, 7], drafter="heads", nodes=8, **options)
    assert len(model.ngrams) == known
    more = model.with_heads({"other": make_heads(2)})
    assert "hybrid+ngram" in more.drafters.choices(Speculation(heads="other"))
    assert more.ngrams is model.ngrams
