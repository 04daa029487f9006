"""Token identity: every lossless rule writes what plain decoding writes, whoever drafts, in every dtype.

test_distributions.py proves the rules by enumeration, test_two_grams.py by counting what is decoded.
"""

import pytest
import torch

from medusa import BaseModel, MedusaModel
from medusa.drafters import HeadsDrafter, HybridDrafter, PlainDrafter, PromptLookupDrafter, SampledHeadsDrafter
from tests.medusa.known_text import Chain, RandomTrees
from tests.medusa.trees import LOPSIDED

PROMPTS = [[5, 6, 7, 5, 6, 8, 5], [40], [9, 9, 9]]
NEW = 12
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "free": {"temperature": 1.0, "seed": 2},
    "everything": {
        "temperature": 1.3, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3,
        "logit_bias": {7: 4.0, 9: -100.0, 100: 2.5}, "seed": [3, 4, 5],
    },
}  # fmt: skip

DRAFTERS = {
    "plain": lambda model, texts: PlainDrafter(),
    "dynamic": lambda model, texts: HeadsDrafter(model.heads, model.base, 16),
    "static": lambda model, texts: HeadsDrafter(model.heads, model.base, 1, LOPSIDED),
    "lookup": lambda model, texts: PromptLookupDrafter(6),
    "hybrid": lambda model, texts: HybridDrafter(
        [PromptLookupDrafter(6)], [HeadsDrafter(model.heads, model.base, 8)], 10
    ),
    "sampled": lambda model, texts: SampledHeadsDrafter(model.heads, model.base, 12, 1.0),
    "sampled hybrid": lambda model, texts: HybridDrafter(
        [PromptLookupDrafter(6)], [SampledHeadsDrafter(model.heads, model.base, 8, 1.0)], 10
    ),
    "random": lambda model, texts: RandomTrees(texts, model.base.vocab_size),
    "never right": lambda model, texts: Chain(texts, model.base.vocab_size, off=1),
    "always right": lambda model, texts: Chain(texts, model.base.vocab_size),
}
RULES = {
    **{name: (name, options) for name, options in SETTINGS.items()},
    "sampling": ("greedy", {"temperature": 1.0, "acceptance": "sampling", "top_k": 1, "seed": 0}),
    "speculative": ("greedy", {"temperature": 1.0, "acceptance": "speculative", "top_k": 1, "seed": 0}),
}
"""What is written by which options: with one surviving token every lossless rule is greedy decoding."""
FLASH, REFERENCE = ("float32", "flash"), ("float64", "reference")
"""A dtype, and an attention backend that runs on a CPU; tests/gpu has the others."""


@pytest.fixture(scope="module", params=[FLASH, REFERENCE], ids=str)
def exact(request, base_directory, make_heads):
    dtype, attention = request.param
    base = BaseModel.load(base_directory, dtype=getattr(torch, dtype), device="cpu", attention=attention)
    assert base.attention.name == attention
    return MedusaModel(base, make_heads())


def texts_of(outputs):
    return [prompt + output.tokens for prompt, output in zip(PROMPTS, outputs, strict=True)]


@pytest.fixture(scope="module")
def written(exact):
    """What plain decoding writes."""
    plain = {"max_new_tokens": NEW, "drafter": PlainDrafter()}
    return {name: exact.generate(PROMPTS, **plain, **options) for name, options in SETTINGS.items()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("exact", [REFERENCE], indirect=True, ids=str)
def test_text_is_that_of_plain_decoding(exact, written, drafter, rule):
    text, options = RULES[rule]
    expected = written[text]
    chosen = DRAFTERS[drafter](exact, texts_of(expected))
    outputs = exact.generate(PROMPTS, max_new_tokens=NEW, drafter=chosen, **options)
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    check_steps(drafter, outputs)


@pytest.mark.parametrize("rule", ["everything", "speculative"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("exact", [FLASH], indirect=True, ids=str)
def test_another_dtype_and_attention_write_it_too(exact, written, drafter, rule):
    test_text_is_that_of_plain_decoding(exact, written, drafter, rule)


def check_steps(drafter, outputs):
    """Drafts were as good as their name says: identity must not come from drafts that never count."""
    for output in outputs:  # each pass adds a token of the base, but for one that is cut at the limit
        assert sum(output.drafted) == len(output.tokens) - output.steps + output.drafted[-1]
    if drafter in ("plain", "never right"):
        assert all(o.steps == len(o.tokens) for o in outputs)
    elif drafter == "always right":
        expected = [1 - (1 - len(o.tokens)) // 5 for o in outputs]  # the first one comes with the prompt
        assert [o.steps for o in outputs] == expected, "four drafted tokens and one of the base"
    elif drafter == "random":
        assert sum(o.steps for o in outputs) < 0.8 * sum(len(o.tokens) for o in outputs)


def test_speculative_without_drawn_drafts_is_sampling(exact, written):
    outputs = exact.generate(PROMPTS, max_new_tokens=NEW, acceptance="speculative", **SETTINGS["free"])
    assert [o.tokens for o in outputs] == [o.tokens for o in written["free"]]


def test_speculative_repeats_itself_for_a_seed_and_not_for_another(exact):
    options = {"max_new_tokens": NEW, "temperature": 1.0, "acceptance": "speculative", "drafter": "heads-sampled"}
    options["nodes"] = 16  # sizes that follow costs and earlier answers would change the draws
    batch = exact.generate(PROMPTS, seed=[3, 4, 5], **options)
    assert exact.generate(PROMPTS[1], seed=4, **options).tokens == batch[1].tokens
    assert exact.generate(PROMPTS[1], seed=3, **options).tokens != batch[1].tokens
    assert sum(o.steps for o in batch) < sum(len(o.tokens) for o in batch)


@pytest.fixture(scope="module", params=[(0.7, None), (1.3, {7: 3.0, 12: -100.0})], ids=str)
def penalised(request, exact, written):
    """Options, and the texts that transformers writes with them, which are others."""
    penalty, bias = request.param
    biases = {"sequence_bias": {(token,): value for token, value in bias.items()}} if bias else {}
    texts = [
        exact.base.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), pad_token_id=0, do_sample=False,
            max_new_tokens=NEW, repetition_penalty=penalty, **biases,
        )[0].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    assert all(text != plain for text, plain in zip(texts, texts_of(written["greedy"]), strict=True))
    return {"repetition_penalty": penalty, "logit_bias": bias, "max_new_tokens": NEW}, texts


@pytest.mark.parametrize("drafter", ["plain", "hybrid", "random"])
def test_penalty_and_bias_are_those_of_transformers(exact, penalised, drafter):
    options, texts = penalised
    outputs = exact.generate(PROMPTS, drafter=DRAFTERS[drafter](exact, texts), **options)
    assert texts_of(outputs) == texts
    check_steps(drafter, outputs)
