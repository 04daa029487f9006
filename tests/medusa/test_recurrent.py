"""Bases with recurrent layers: states of trees, of texts that come and go, and of texts that begin like others.

test_conformance.py compares every family with transformers over each path.
"""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa import BaseModel, EngineConfig, MedusaModel, Prefix, SamplingParams
from medusa.cache import BLOCK, CachedSequence, provisional
from medusa.cpu import passes
from medusa.loading.self_test import choose_decoding, fuse
from medusa.recurrence import StatesLostError
from medusa.recurrence.states import MOST_SAVED
from medusa.tree import Draft
from tests.medusa.test_batch import check
from tests.medusa.test_conformance import DELTA, MAMBA
from tests.medusa.test_generate import default_dtype

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "eos_token_id": 0, "pad_token_id": 0,
    "bos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
KINDS = {
    "qwen3_5_text": DELTA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "position_embedding_type": None}
    | {"shared_intermediate_size": 40, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
}
FUSED = ("qwen3_5_text", "lfm2", "bamba", "granitemoehybrid")
"""Whose whole pass our kernels compute."""
PROMPT = [5, 6, 7, 5, 6, 8, 5, 6]


def build(kind, tokenizer, seed=0, **changes):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SHAPE | KINDS[kind] | changes)
    return AutoModelForCausalLM.from_config(config).to(torch.float32).eval()


@pytest.fixture(scope="module", params=[*KINDS, *(f"{kind}, fused" for kind in FUSED)])
def loaded(request, tokenizer):
    """transformers' own model, and the same one prepared for decoding."""
    kind, *fused = request.param.split(", ")
    theirs = build(kind, tokenizer)
    base = choose_decoding(BaseModel(copy.deepcopy(theirs), tokenizer, kind))
    base = fuse(base) if fused else base
    assert base.fused == bool(fused)
    return theirs, base


@pytest.fixture
def speaker(loaded, make_heads):
    base = loaded[1]
    return MedusaModel(base, make_heads(base="").float())


def test_states_do_not_depend_on_torchs_default_dtype(speaker):
    expected = speaker.generate(PROMPT, max_new_tokens=12, nodes=4).tokens
    with default_dtype(torch.float16):
        assert speaker.generate(PROMPT, max_new_tokens=12, nodes=4).tokens == expected


def greedily(theirs, prompt, tokens):
    """Whether transformers would write these tokens, each behind those before it, in one pass without a cache."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist() == tokens


def test_text_is_that_of_transformers(loaded, speaker):
    assert speaker.base.recurrent and speaker.base.decoding == "tree"
    expected = speaker.generate(PROMPT, max_new_tokens=40, ignore_eos=True, nodes=1).tokens
    assert len(expected) == 40 and greedily(loaded[0], PROMPT, expected)
    for drafter in ("heads", "prompt-lookup", "hybrid", "early-exit"):
        output = speaker.generate(PROMPT, max_new_tokens=40, ignore_eos=True, drafter=drafter, nodes=6)
        assert output.tokens == expected, drafter


def test_a_draft_model_may_have_states_too(loaded, speaker, tokenizer):
    """It drafts in passes whose tokens are taken back."""
    theirs, base = loaded
    draft = choose_decoding(BaseModel(build(base.name, tokenizer, seed=1), tokenizer, "draft"))
    same = choose_decoding(BaseModel(copy.deepcopy(theirs), tokenizer, "same"))
    steps = []
    for small in (draft, same):
        output = MedusaModel(base, draft_model=small).generate(
            PROMPT, max_new_tokens=40, ignore_eos=True, drafter="draft-model", nodes=6
        )
        assert len(output.tokens) == 40 and greedily(theirs, PROMPT, output.tokens)
        steps.append(output.steps)
    assert steps[1] < 0.8 * steps[0], "its own drafts are right"


@pytest.mark.parametrize("seed", range(4))
def test_requests_write_what_they_write_alone(speaker, seed):
    """Also where requests lose their room, and are computed again."""
    pool = speaker.base.new_pool(7 * BLOCK) if seed % 2 else None
    batch = speaker.batch(pool, EngineConfig(chunk=4, max_requests=4, tree_reserve=2 * BLOCK))
    check(speaker, batch, seed)
    batch.pool.check_integrity()
    assert not batch.pool.recurrent._kept, "nothing is kept of texts that have ended"


def test_a_text_begins_where_states_are_saved(speaker):
    prefix, first = Prefix(), [3 + n % 50 for n in range(3 * BLOCK + 5)]
    params = {"max_new_tokens": 8, "ignore_eos": True, "drafter": "heads", "nodes": 4}
    answer = speaker.generate(first, prefix=prefix, **params)
    assert answer.cached_tokens == 0
    second = [*first, *answer.tokens, 9, 9, 9]
    again = speaker.generate(second, prefix=prefix, **params)
    assert again.cached_tokens == 3 * BLOCK, "the last end of a block before the end of the first prompt"
    assert again.tokens == speaker.generate(second, **params).tokens
    edited = [*first[:BLOCK], 99, *first[BLOCK + 1 :]]
    other = speaker.generate(edited, prefix=prefix, **params)
    assert other.cached_tokens == 0, "keys of its first block are known, and no states after it"
    assert other.tokens == speaker.generate(edited, **params).tokens


def test_saved_states_are_few_and_forgotten_with_their_texts(speaker):
    prefix = Prefix(4096)
    for first in range(MOST_SAVED + 2):
        speaker.generate([first, *range(3, 40)], prefix=prefix, max_new_tokens=1)
    pool = prefix.pool(speaker.base)
    assert len(pool.recurrent.saved) == MOST_SAVED
    assert speaker.generate([MOST_SAVED, *range(3, 40)], prefix=prefix, max_new_tokens=1).cached_tokens == BLOCK
    assert speaker.generate([1, *range(3, 40)], prefix=prefix, max_new_tokens=1).cached_tokens == 0
    pool.forget()
    assert not pool.recurrent.saved


def test_a_prompt_does_not_wait_for_states_that_never_come(speaker):
    """It begins like a long one, whose first states are saved far behind that."""
    batch = speaker.batch(config=EngineConfig(chunk=2 * BLOCK))
    params, start = SamplingParams(max_new_tokens=4, ignore_eos=True), [3 + n % 50 for n in range(BLOCK)]
    long = batch.add([*start, *[7] * 190], params)
    batch.step()
    short = batch.add([*start, 9, 9], params)
    batch.step()
    batch.step()
    assert short.output.tokens and not long.output.tokens


def test_rows_of_prompts_are_not_kept(speaker):
    batch = speaker.batch()
    request = batch.add([3 + n % 50 for n in range(BLOCK)], SamplingParams(max_new_tokens=4, ignore_eos=True))
    batch.step()
    kept = batch.pool.recurrent._kept[request.cached.line]
    assert kept and all(not part.rows and part.end is None for part in kept.values())
    batch.remove(request)


@pytest.mark.parametrize(
    ("kind", "layer_types"),
    [("lfm2", ["full_attention"] * 4), ("granitemoehybrid", ["attention"] * 4)],
)
def test_models_of_these_families_may_have_attention_layers_alone(kind, layer_types, tokenizer):
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SHAPE | MAMBA | {"layer_types": layer_types})
    config.num_local_experts = 0
    base = choose_decoding(BaseModel(AutoModelForCausalLM.from_config(config).eval(), tokenizer, kind))
    prefix, prompt = Prefix(), [3 + n % 50 for n in range(BLOCK + 5)]
    for cached in (0, BLOCK):
        assert MedusaModel(base).generate(prompt, prefix=prefix, max_new_tokens=2).cached_tokens == cached
    assert not base.recurrent


def test_equal_prompts_are_computed_once(speaker):
    prompt = [3 + n % 50 for n in range(2 * BLOCK + 5)]
    outputs = speaker.generate([prompt] * 3, max_new_tokens=6, ignore_eos=True, nodes=4, drafter="heads")
    assert [output.cached_tokens for output in outputs] == [0, 2 * BLOCK, 2 * BLOCK]
    assert len({tuple(output.tokens) for output in outputs}) == 1


def test_a_pass_that_fails_changes_no_state(speaker, monkeypatch):
    """The interrupted step is made again."""
    base, pool = speaker.base, speaker.base.new_pool()
    with torch.inference_mode():
        expected = base.hidden_states(torch.tensor([PROMPT]))[0]
    one, last, kernels = CachedSequence(pool), base.decoder.layers[-1], passes.run

    def fail(*args, **options):
        kernels(*args, **options)
        raise ZeroDivisionError

    tree = Draft.of(torch.tensor([[5, 9, 6, 6]]), torch.tensor([[0, 0, 0, 2]]), 3)

    def run(draft):
        with torch.inference_mode():
            return base.run(pool, plan := base.plan([(draft, [one])])), plan

    run(Draft.chain(torch.tensor([PROMPT[:-3]])))
    one.length += len(PROMPT) - 3
    for _ in range(2):  # an abandoned tree, and a pass that ends between two layers
        run(tree)
        handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with monkeypatch.context() as patched:
            patched.setattr("medusa.cpu.fused.run", fail)
            with pytest.raises(ZeroDivisionError):
                run(tree)
        handle.remove()
    hidden, _ = run(Draft.of(torch.tensor([[8, 9, 5, 6]]), torch.tensor([[0, 0, 0, 2]]), 3))
    torch.testing.assert_close(hidden[[0, 2, 3]], expected[-3:], atol=2e-4, rtol=1e-3)


def test_states_of_provisional_tokens_are_taken_back(speaker):
    base, pool = speaker.base, speaker.base.new_pool()
    one = CachedSequence(pool)

    def run(*tokens):
        with torch.inference_mode():
            hidden = base.run(pool, base.plan([(Draft.chain(torch.tensor([tokens])), [one])]))
        one.length += len(tokens)
        return hidden

    run(*PROMPT)
    with provisional([one]):
        run(9)
        run(9)
    with torch.inference_mode():
        expected = base.hidden_states(torch.tensor([[*PROMPT, 11]]))[0, -1]
    torch.testing.assert_close(run(11)[0], expected, atol=2e-4, rtol=1e-3)


def test_a_state_that_is_gone_is_named(speaker):
    one = CachedSequence(speaker.base.new_pool())
    one.length = 5
    with pytest.raises(StatesLostError, match="no state of this text after 5 tokens; compute it from its beginning"):
        speaker.base.run(one.pool, speaker.base.plan([(Draft.chain(torch.tensor([[5]])), [one])]))
