"""Pairs of one series: OPT-350M with OPT-125M as its draft model, GPT-2 large with GPT-2 small; tiny, in their shapes.

OPT-350M is the odd one of its series: its embeddings are narrower than its layers, and its norms come last.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.acceptance.logits import Warper
from medusa.drafters import ModelDrafter, SmallModel
from medusa.heads.layer import LayerConfig
from medusa.loading.self_test import choose_decoding
from medusa.train.fresh_heads import last_norm
from tests.medusa.rules import make_rule
from tests.medusa.test_conformance import config_of
from tests.medusa.test_model_drafter import words
from tests.medusa.test_two_grams import LIMIT, PROMPT, V, chi_square, two_grams

PAIRS = {
    "opt": (("opt-350m", {"num_hidden_layers": 4}), ("opt", {"num_hidden_layers": 2})),
    "gpt2": (("gpt2", {"hidden_size": 48, "num_hidden_layers": 4}), ("gpt2", {"num_hidden_layers": 2})),
}
PROMPTS = [[5, 6, 7], [9, 8, 3, 12, 40, 9, 8], [11] * 20]
NEW = 16
DRAWN = {"temperature": 1.0, "acceptance": "speculative", "drafter": "draft-model"}


def model_of(family, seed=0, **shape):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **shape)).double()
    return choose_decoding(BaseModel(model, words(model.config.vocab_size), family))


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    return [model_of(family, **shape) for family, shape in PAIRS[request.param]]


@pytest.fixture(scope="module")
def texts(pair):
    """What transformers writes without a cache."""
    return [written(pair[0], prompt) for prompt in PROMPTS]


@torch.inference_mode()
def written(base, prompt):
    text = list(prompt)
    for _ in range(NEW):
        text.append(int(base.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def heads_for(base, architecture, **options):
    """Heads of a tiny training: they begin with what the base says next, which is right now and then."""
    if architecture in ("attention", "block"):
        options["layer"] = LayerConfig.of(base.config)
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 3, architecture=architecture, **options))
    heads.init_from_base(base.lm_head_weight, last_norm(base))
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return heads.to(base.dtype)


@pytest.mark.parametrize(
    ("pair", "architecture", "options"),
    [
        ("opt", "medusa", {"own_lm_heads": True}),
        ("gpt2", "recurrent", {"feature_layers": (1, 3)}),
        ("opt", "markov", {"draft_vocab_size": 30}),
        ("opt", "attention", {"feature_layers": (1, 2, 3)}),
        ("gpt2", "block", {"feature_layers": (1, 2)}),
    ],
    indirect=["pair"], ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_heads_and_models_draft_and_the_text_is_transformers_own(pair, texts, architecture, options):
    base, small = pair
    heads = heads_for(base, architecture, **options)
    model = MedusaModel(base, heads, draft_model=small)
    for drafter in ("heads", "draft-model+heads"):
        outputs = model.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, drafter=drafter, nodes=7)
        assert [output.tokens for output in outputs] == texts


@pytest.mark.parametrize(
    "options", [{"drafter": "draft-model"}, {"drafter": "early-exit"}, {"top_k": 1} | DRAWN], ids=str
)
def test_models_alone_draft_and_one_surviving_token_is_greedy_under_rejection_too(pair, texts, options):
    model = MedusaModel(pair[0], draft_model=pair[1])
    outputs = model.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, nodes=5, **options)
    assert [output.tokens for output in outputs] == texts


def test_draws_of_a_model_that_is_the_base_are_never_refused(pair):
    base = pair[0]
    outputs = MedusaModel(base, draft_model=base).generate(
        PROMPTS, max_new_tokens=NEW, ignore_eos=True, nodes=5, seed=1, **DRAWN
    )
    assert {output.steps for output in outputs} == {1 + (NEW - 1) // 5}


@pytest.mark.parametrize("name", ["opt", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_draws_that_pass_rejection_follow_the_law_of_the_large_model(name):
    """Tokens drawn by the small model, p / q, and what is left of p where they are refused."""
    base, small = (
        model_of(family, seed, **shape, vocab_size=V, pad_token_id=None)
        for seed, (family, shape) in enumerate(PAIRS[name])
    )
    drafter = ModelDrafter(SmallModel(small), V, 4, 0.1, noise=Warper(1.0), drawn=True)

    def after(text):
        return base.logits(base.hidden_states(torch.tensor([text]))[0, -1]).softmax(-1)

    law = torch.cat([after(PROMPT)[first] * after([*PROMPT, first]) for first in range(V)])
    assert chi_square(two_grams(base, drafter, make_rule("speculative", temperature=1.0), 1000), law) < LIMIT
    assert not torch.allclose(law, torch.full_like(law, 1 / V**2), atol=0.01)
