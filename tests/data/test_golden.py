"""What is trained on under the chat templates of well-known models, written out as text that a person can check."""

import functools
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa.data.chat import documents
from medusa.data.inspect import marked_text

HERE = Path(__file__).parent
SYSTEM = {"role": "system", "content": "Answer briefly."}
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Name two primes,\none per line."},
    {"role": "assistant", "content": "2\n3"},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]
REASONED = [TURNS[0], {"role": "assistant", "content": "<think>\nTwice two.\n</think>\n\n4"}, *TURNS[2:]]
# special tokens, the first of which begins a text and the second of which ends one; tokens that are only added
TOKENS = {
    "llama3": (["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], []),
    "qwen3": (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], ["<think>", "</think>"]),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]"], []),
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], []),
    "chatml": (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], []),
    "phi": (["<|endoftext|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], []),
}


@functools.cache
def byte_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """One token per byte and per token of the template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special, added = TOKENS[name]
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    raw.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=special[0], eos_token=special[1],
        chat_template=(HERE / "templates" / f"{name}.jinja").read_text(),
    )  # fmt: skip


def conversation(name: str) -> list[dict[str, str]]:
    return TURNS if name == "gemma" else [SYSTEM, *(REASONED if name == "qwen3" else TURNS)]


@pytest.mark.parametrize("name", TOKENS)
def test_what_is_trained_on_is_as_written_down(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    found = documents(tokenizer, conversation(name))
    parts = [f"=== {n} of {len(found)}\n{marked_text(tokenizer, *part)}\n" for n, part in enumerate(found, start=1)]
    path = HERE / "golden" / f"{name}.txt"
    if os.environ.get("MEDUSA_WRITE_GOLDEN"):
        path.write_text("".join(parts), encoding="utf-8")
    assert "".join(parts) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TOKENS)
def test_each_answer_follows_what_is_served_and_is_trained_on_once(name: str) -> None:
    tokenizer, turns = byte_tokenizer(name), conversation(name)
    starts = []
    for ids, mask in documents(tokenizer, turns):
        edges = [place for place in range(len(ids)) if mask[place] and not mask[place - 1]]
        starts += [ids[:place] for place in edges]
    served = [
        tokenizer.apply_chat_template(turns[:place], add_generation_prompt=True, return_dict=False)
        for place, turn in enumerate(turns)
        if turn["role"] == "assistant"
    ]
    assert starts == served


def test_roles_that_a_template_does_not_know_are_named() -> None:
    with pytest.raises(ValueError, match=r"conversation \('system: Answer briefly.*refused.*System role not supported"):
        documents(byte_tokenizer("gemma"), [SYSTEM, *TURNS])
    with pytest.raises(ValueError, match=r"refused by the chat template: After the optional system.*must alternate"):
        documents(byte_tokenizer("mistral"), [*TURNS[:1], *TURNS])
