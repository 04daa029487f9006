"""What the self-test decides at load, and that the text is right whatever it decides."""

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa import BaseModel, Draft, MedusaModel, Tree
from medusa.attention import Span
from medusa.base.context import context_length
from medusa.drafters import Drafter
from medusa.loading.self_test import UnsupportedBaseError, choose_decoding
from tests.medusa.test_conformance import config_of

PROMPTS = ["def f(x):", "a", "once upon a time"]
SHAPES = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": True},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
}


def load(kind, tokenizer, directory):
    """A small random base of a family, saved and loaded as a user does."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=257, initializer_range=0.3, eos_token_id=0, **SHAPES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return MedusaModel.from_pretrained(None, base=directory, dtype=torch.float64)


@pytest.fixture(scope="module")
def mpt(tokenizer, make_heads, tmp_path_factory):
    return MedusaModel(load("mpt", tokenizer, tmp_path_factory.mktemp("mpt")).base, make_heads())


@pytest.mark.parametrize("kind", ["bloom", "falcon", "mamba"])
def test_what_cannot_be_decoded_is_refused_with_one_sentence(kind, tokenizer, tmp_path):
    with pytest.raises(
        UnsupportedBaseError, match=rf"{kind}\) cannot be decoded here: .*; use one whose layers all keep keys"
    ):
        load(kind, tokenizer, tmp_path)


def test_damaged_weights_are_told_from_a_family_that_is_not_known():
    model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(UnsupportedBaseError, match=r"NaN\) for plain text: its weights are damaged, or too large for"):
        choose_decoding(BaseModel(model, None, "llama", "reference"))


def test_a_context_as_small_as_the_test_s_texts_is_enough():
    config = config_of("falcon", max_position_embeddings=40)
    base = BaseModel(AutoModelForCausalLM.from_config(config).double().eval(), None, "falcon", "reference")
    assert choose_decoding(base).decoding == "tree"


def test_alibi_by_rows_verifies_chains_and_says_so(tokenizer, tmp_path, caplog):
    base = load("mpt", tokenizer, tmp_path).base
    assert (base.decoding, base.context_length) == ("chain", 32)
    (warning,) = [record.message for record in caplog.records if record.name == "medusa.loading.self_test"]
    assert "mpt) cannot verify trees: attention of layer" in warning and "from plain text by" in warning
    assert warning.endswith("; drafts are chains")


SAMPLED = {"temperature": 1.0, "seed": 4, "max_new_tokens": 50}


@pytest.fixture(scope="module")
def written(mpt):
    """What transformers writes greedily, and the base alone when it samples."""
    ids = [mpt.base.tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    texts = [mpt.base.model.generate(prompt, max_length=32, do_sample=False)[0] for prompt in ids]
    greedy = [text[prompt.shape[1] :].tolist() for text, prompt in zip(texts, ids, strict=True)]
    return greedy, [o.tokens for o in mpt.generate(PROMPTS, nodes=1, **SAMPLED)]


@pytest.mark.parametrize("drafter", ["heads", "prompt-lookup", "hybrid"])
def test_chains_write_what_the_base_writes_alone(mpt, written, drafter):
    """Up to the last position of the context, beyond which an ALiBi table has no rows; in a ragged batch too."""
    greedy, sampled = written
    options = {"max_new_tokens": 50, "drafter": drafter}
    outputs = mpt.generate(PROMPTS, **options)
    assert [o.tokens for o in outputs] == greedy
    assert any(sum(output.drafted) for output in outputs), "chains save steps"
    assert mpt.generate(PROMPTS[0], nodes=9, **options).tokens == greedy[0]
    assert [o.tokens for o in mpt.generate(PROMPTS, drafter=drafter, **SAMPLED)] == sampled


class Trees(Drafter):
    """Somebody's own drafter, which knows nothing of the base: proposes four children of the root."""

    nodes = 5

    def propose(self, state, cache=None):
        children = (state.roots[:, None] + torch.arange(1, 5)) % 257
        tokens = torch.cat([state.roots[:, None], children], dim=1)
        return Draft.of(tokens, torch.zeros_like(tokens), depth=4)


def test_trees_never_reach_a_base_that_verifies_chains(mpt):
    expected = [o.tokens for o in mpt.generate(PROMPTS, max_new_tokens=12, nodes=1)]
    assert [o.tokens for o in mpt.generate(PROMPTS, max_new_tokens=12, drafter=Trees())] == expected
    assert [o.tokens for o in mpt.generate(PROMPTS, max_new_tokens=12, tree=Tree.chain(2))] == expected
    with pytest.raises(ValueError, match=r"tree \(4 nodes, depth 1\) branches .* give Tree.chain\(1\)"):
        mpt.generate("a", tree=Tree.full([3]))


def changed(base, monkeypatch, forward):
    """The base with another forward pass of its decoder."""
    original = base.decoder.forward
    monkeypatch.setattr(base.decoder, "forward", lambda *args, **options: forward(original, *args, **options))


def without_plan(forward, *args, tree_plan=None, **options):
    return forward(*args, **options)


def one_row_at_a_time(forward, *args, past_key_values=None, **options):
    """A family that computes several cached rows wrongly."""
    out = forward(*args, past_key_values=past_key_values, **options)
    if past_key_values is not None and out.last_hidden_state.shape[1] > 1:
        out.last_hidden_state = out.last_hidden_state.flip(-1)
    return out


def positions_of_the_longest(forward, *args, past_key_values=None, position_ids=None, **options):
    """A family that counts positions itself, from the length of the cache."""
    if past_key_values is not None:
        count = torch.arange(position_ids.shape[1]) + past_key_values.get_seq_length()
        position_ids = count.expand_as(position_ids)
    return forward(*args, past_key_values=past_key_values, position_ids=position_ids, **options)


def test_a_base_that_is_wrong_only_beside_a_longer_sequence_is_refused(base, monkeypatch):
    changed(base, monkeypatch, positions_of_the_longest)
    with pytest.raises(UnsupportedBaseError, match="attention of layer 1 differs"):
        choose_decoding(base)


def test_a_base_with_windows_that_drops_the_plan_is_refused(base, monkeypatch):
    changed(base, monkeypatch, without_plan)
    monkeypatch.setattr(base, "spans", {0: Span(window=100), 1: Span()})
    with pytest.raises(UnsupportedBaseError, match="cannot be decoded here"):
        choose_decoding(base)
    assert not base.traits.explicit_mask


def test_where_only_single_rows_are_right_every_step_is_plain(base, make_heads, monkeypatch, caplog):
    expected = [o.tokens for o in MedusaModel(base).generate(PROMPTS, max_new_tokens=8)]
    changed(base, monkeypatch, one_row_at_a_time)
    base = choose_decoding(base)
    assert base.decoding == "plain"
    model = MedusaModel(base, make_heads())
    for _ in range(2):
        outputs = model.generate(PROMPTS, max_new_tokens=8, nodes=16)
    assert [o.tokens for o in outputs] == expected
    assert all(o.tokens_per_step == 1 for o in outputs)
    assert [o.tokens for o in model.generate(PROMPTS, max_new_tokens=8, drafter=Trees())] == expected
    warnings = [record.message for record in caplog.records if record.name.startswith("medusa.")]
    assert warnings[0].endswith("it decodes plainly, one token per step")
    assert sum("only decodes plainly" in warning for warning in warnings) == 1


def test_an_output_layer_that_is_more_than_a_matrix_is_noticed(base_directory):
    base = BaseModel.load(base_directory, dtype=torch.float64, device="cpu")

    def turn(model, args, output):
        output.logits = output.logits.roll(1, dims=-1)

    base.model.register_forward_hook(turn)
    with pytest.raises(UnsupportedBaseError, match="its logits differ"):
        choose_decoding(base)


def test_few_positions_reach_the_output_layer(base):
    """With hundreds of thousands of tokens it would take most of the time."""
    rows = []
    hook = base.model.get_output_embeddings().register_forward_hook(
        lambda layer, args, output: rows.append(output.shape[:-1].numel())
    )
    try:
        assert choose_decoding(base).decoding == "tree"
    finally:
        hook.remove()
    assert rows and max(rows) <= 24, "4 texts, 3 positions behind each of 2 prompts"


def test_a_family_that_computes_all_logits_is_checked_too(base, monkeypatch):
    forward = base.model.forward
    monkeypatch.setattr(base.model, "forward", lambda input_ids, use_cache: forward(input_ids, use_cache=use_cache))
    assert choose_decoding(base).decoding == "tree"


TURNED = {
    "phi3": (
        "longrope rotates all keys of longer texts",
        {
            "max_position_embeddings": 64, "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            },
        },
    ),
    "llama": (
        "dynamic rotary positions rotate all keys of a longer text",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", TURNED)
def test_a_base_is_used_up_to_where_its_keys_would_turn(family, tokenizer, caplog):
    why, options = TURNED[family]
    config = AutoConfig.for_model(
        family, vocab_size=50, pad_token_id=0, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=None, **options,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="medusa"):
        base = choose_decoding(BaseModel(AutoModelForCausalLM.from_config(config).double(), tokenizer, "small"))
    assert "base (small) is used up to 32 tokens of context: " in caplog.text
    assert why in caplog.text
    model, text = MedusaModel(base), [5, 6, 7]
    completion = model.generate(text, max_new_tokens=64, nodes=4, ignore_eos=True).tokens
    assert len(completion) == 29
    with torch.inference_mode():
        for token in completion:
            text.append(int(base.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            assert text[-1] == token
    with pytest.raises(ValueError, match=rf"no room in the base's context \(32 tokens: .*{why}"):
        model.generate(text, max_new_tokens=1)


def test_a_family_whose_keys_do_not_turn_has_all_of_its_context(caplog):
    config = AutoConfig.for_model("phi3", max_position_embeddings=64, original_max_position_embeddings=64)
    with caplog.at_level(logging.WARNING, logger="medusa"):
        assert context_length(config) == 64
    assert not caplog.records
