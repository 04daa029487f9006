"""Windows: what a layer does counts, whatever its config says."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from medusa import BaseModel, MedusaModel
from medusa.attention import Span, UnknownSpanError
from medusa.loading.self_test import UnsupportedBaseError, choose_decoding

SHAPE = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
PROMPTS = [[(7 * i + 3) % 97 + 1 for i in range(300)], [(11 * i + 5) % 97 + 1 for i in range(40)]]


def tiny(family: str, **options) -> BaseModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPE | options))
    return BaseModel(AutoModelForCausalLM.from_config(config).double(), None, family)


def assert_text_is_transformers_own(base: BaseModel, tokenizer, tokens: int = 6) -> None:
    """Without its cache: that one drops rows beyond a window that the config mentions."""
    base.tokenizer, expected = tokenizer, []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = base.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=False
        )
        expected.append(text[0, len(prompt) :].tolist())
    model = MedusaModel(base)
    for options in ({"nodes": 1}, {"drafter": "prompt-lookup", "nodes": 8}):
        written = [output.tokens for output in model.generate(PROMPTS, max_new_tokens=tokens, **options)]
        assert written == expected


GPT_NEO = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "window_size": 256}


def test_windows_by_cache_row_are_refused():
    """GPT-Neo's local layers, under a name that nobody looks for, shorter than the context."""
    base = tiny("gpt_neo", **GPT_NEO, attention_types=[[["global", "local"], 1]])
    with pytest.raises(UnsupportedBaseError, match="attention of layer 2 differs from plain text"):
        choose_decoding(base)


def test_the_same_family_without_local_layers_is_right(tokenizer):
    base = tiny("gpt_neo", **GPT_NEO, attention_types=[[["global"], 2]])
    base = choose_decoding(base)
    assert (base.decoding, base.traits.explicit_mask) == ("tree", True)
    assert_text_is_transformers_own(base, tokenizer)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_window_that_only_the_config_mentions_is_none(family, tokenizer):
    base = tiny(family, sliding_window=64)
    assert not any(window for window, _ in base.spans.values())
    base = choose_decoding(base)
    assert base.decoding == "tree"
    assert_text_is_transformers_own(base, tokenizer)


@pytest.mark.parametrize(
    ("family", "options", "spans"),
    [
        ("mistral", {"sliding_window": 64}, [Span(window=64)] * 2),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            [Span(), Span(window=64)],
        ),
        ("gemma2", {"sliding_window": 256, "head_dim": 8}, [Span(window=256), Span()]),
    ],
)
def test_windows_are_those_of_the_masks(family, options, spans, tokenizer):
    base = tiny(family, **options)
    assert [base.spans[layer] for layer in range(2)] == spans
    base = choose_decoding(base)
    assert_text_is_transformers_own(base, tokenizer)


@pytest.mark.parametrize("size", [1, 2, 7, 509, 511])
def test_a_rule_of_positions_is_recognised(size):
    from medusa.attention.spans import _span

    zero = torch.zeros(1, dtype=torch.int64)
    assert _span(masking_utils.sliding_window_causal_mask_function(size), 512) == Span(window=size)
    if size > 1:  # chunks of one token are windows of one
        assert _span(masking_utils.chunked_causal_mask_function(size, zero), 512) == Span(chunk=size)
    assert _span(masking_utils.sliding_window_causal_mask_function(512), 512) == Span()


def test_an_unknown_rule_is_refused(monkeypatch):
    def every_other(batch, head, row, column):
        return (column <= row) & ((row - column) % 2 == 0)

    monkeypatch.setattr(masking_utils, "causal_mask_function", every_other)
    base = tiny("llama")
    with pytest.raises(UnsupportedBaseError, match=r"layer 1 has a mask that is neither .*; use another base"):
        choose_decoding(base)
    with pytest.raises(UnknownSpanError, match="layer 1"):
        MedusaModel(base).generate([1, 2, 3], max_new_tokens=2)
