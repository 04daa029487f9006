"""Lossless by counting: two-grams of many short samples against the base's exact law, and planted biases seen by it.

A base over eight tokens decodes one prompt with thousands of seeds as one batch; the law of its first two tokens is
computed from its logits. The same statistic must catch a rule that is a little wrong.
"""

import dataclasses
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import BaseModel, HeadsConfig, Tree, build_heads
from medusa.acceptance import rules
from medusa.acceptance.logits import Warper
from medusa.drafters import (
    HeadsDrafter,
    HybridDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SampledHeadsDrafter,
    SmallModel,
)
from medusa.engine.step import decode_step
from medusa.noise import OTHER_DRAFTS
from tests.medusa.biased import forgetful, generous
from tests.medusa.passes import prefill
from tests.medusa.rules import make_rule

V, SAMPLES = 8, 3000
PROMPT = [1, 5, 3, 1, 5]
TREE = Tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))
SETTINGS = {"temperature": 2.0, "top_p": 0.97, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}}


@pytest.fixture(scope="module")
def base():
    return tiny_base(0)


def tiny_base(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, initializer_range=0.5, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return BaseModel(LlamaForCausalLM(config), tokenizer=None)


def random_heads(base, **options):
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(base.hidden_size, V, 2, architecture="recurrent", **options))
    for parameter in heads.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    return heads.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def heads(base):
    return random_heads(base)


@pytest.fixture(scope="module")
def law(base):
    """[V * V] exact law of the first two tokens under ``SETTINGS``, written out."""

    def after(text):
        logits = base.logits(base.hidden_states(torch.tensor([text]))[0, -1]).double()
        logits[3] += 1.0
        seen = torch.tensor(sorted(set(text)))
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.2, logits[seen] / 1.2)
        probs, order = (logits / 2.0).softmax(-1).sort(descending=True)
        kept = probs * (probs.cumsum(-1) - probs < 0.97)
        return torch.zeros(V, dtype=torch.float64).scatter(0, order, kept / kept.sum())

    return torch.cat([after(PROMPT)[first] * after([*PROMPT, first]) for first in range(V)])


def two_grams(base, drafter, rule, count=SAMPLES):
    """[V * V] how often each pair of first two tokens is decoded; one sequence per seed."""
    sequences, state = prefill(base, [PROMPT] * count, SEEDS[:count])
    texts = [[] for _ in range(count)]
    while min(map(len, texts)) < 2:
        result = decode_step(base, sequences, drafter, rule, state)
        for text, tokens in zip(texts, result.tokens, strict=True):
            text += tokens
        state = dataclasses.replace(result.state, active=torch.tensor([len(text) < 2 for text in texts]))
    return torch.bincount(torch.tensor([text[0] * V + text[1] for text in texts]), minlength=V * V)


def chi_square(counts, law):
    """The statistic in standard deviations from its mean (Wilson and Hilferty 1931); rare pairs count as one."""
    expected = law * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert (counts[expected == 0] == 0).all(), "a pair that never comes"
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    cube = (((counts - expected) ** 2 / expected).sum().item() / freedom) ** (1 / 3)
    return (cube - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


SEEDS = [7919 * sample for sample in range(SAMPLES)]
LIMIT = 3.7
"""Standard deviations; a right rule goes beyond with probability 1e-4."""


def drafters(base, heads):
    drawn = SampledHeadsDrafter(heads, base, TREE.nodes, 1.0, TREE)
    other, noise = tiny_base(1), Warper(1.5, top_k=6, top_p=0.9)
    written = ModelDrafter(SmallModel(other), V, 4, 0.1, noise=noise, drawn=True)
    second = ModelDrafter(SmallModel(tiny_base(2)), V, 4, 0.1, noise=noise, drawn=True, stream=OTHER_DRAFTS[0])
    return {
        "a model's draws": written,
        "two models' draws": HybridDrafter([], [written, second], 12),
        "a model's draws and the best of heads": HybridDrafter([], [written, HeadsDrafter(heads, base, 4)], 12),
        "best": HeadsDrafter(heads, base, 7),
        "drawn": drawn,
        "looked up and drawn": HybridDrafter([PromptLookupDrafter(3)], [drawn], 12),
    }


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("sampling", "best"),
        ("speculative", "drawn"),
        ("speculative", "looked up and drawn"),
        pytest.param("speculative", "two models' draws", marks=pytest.mark.slow),
        ("speculative", "a model's draws and the best of heads"),
    ],
)
def test_pairs_follow_the_law_of_the_base(base, heads, law, name, drafter):
    counts = two_grams(base, drafters(base, heads)[drafter], make_rule(name, **SETTINGS))
    assert chi_square(counts, law) < LIMIT


def test_pairs_follow_the_law_where_heads_draft_a_part_of_the_vocabulary(base, law):
    heads = random_heads(base, draft_vocab_size=4)
    heads.draft_ids.copy_(torch.tensor([1, 2, 5, 6]))
    counts = two_grams(base, drafters(base, heads)["drawn"], make_rule("speculative", **SETTINGS))
    assert chi_square(counts, law) < LIMIT


@pytest.mark.parametrize(
    ("biased", "drafter"),
    [(generous, "drawn"), (forgetful, "looked up and drawn")],
)
def test_a_bias_of_the_speculative_rule_is_seen(base, heads, law, monkeypatch, biased, drafter):
    monkeypatch.setattr(rules, "rejection_chances", biased)
    counts = two_grams(base, drafters(base, heads)[drafter], make_rule("speculative", **SETTINGS))
    assert chi_square(counts, law) > LIMIT


def test_a_bias_of_the_sampling_rule_is_seen(base, heads, law, monkeypatch):
    """A temperature that is too low."""
    draw = rules._draw

    def colder(draft, logits, state, warper):
        return draw(draft, logits, state, warper._replace(temperature=0.8 * warper.temperature))

    monkeypatch.setattr(rules, "_draw", colder)
    counts = two_grams(base, drafters(base, heads)["best"], make_rule("sampling", **SETTINGS))
    assert chi_square(counts, law) > LIMIT
