"""The tokenizer of a GGUF file, as transformers reads it, with every token under its own id."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

TOKENS = "tokenizer.ggml.tokens"
CONTROL, USER_DEFINED = 3, 4
"""llama.cpp's types of tokens that are found whole in a text."""


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a file.

    transformers respells tokens with characters that byte-level vocabularies do not have, as DeepSeek's control tokens:
    they would be split, and their names would get new ids, which the model does not have.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    told, _ = read_gguf_metadata(str(file), (TOKENS,))
    kinds = dict(enumerate(told.get("tokenizer.ggml.token_type") or ()))
    wrong = {
        number: name
        for number, name in enumerate(told.get(TOKENS) or ())
        if kinds.get(number) in (CONTROL, USER_DEFINED) and tokenizer.convert_tokens_to_ids(name) != number
    }
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = "ByteLevel" in json.dumps([raw["pre_tokenizer"], raw["decoder"]])  # others spell spaces in their way
    if not wrong or not byte_level or raw["model"]["type"] != "BPE":
        return tokenizer
    vocabulary, names = raw["model"]["vocab"], set(wrong.values())
    for spelling in [spelling for spelling, number in vocabulary.items() if number in wrong]:
        del vocabulary[spelling]
    vocabulary |= {name: number for number, name in wrong.items()}
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [one for one in raw["added_tokens"] if one["content"] not in names]
    added += [
        {"id": number, "content": name, **usual, "special": kinds[number] == CONTROL} for number, name in wrong.items()
    ]
    raw["added_tokens"] = sorted(added, key=lambda one: int(one["id"]))
    for template in _templates(raw["post_processor"]):
        for name, one in template.items():
            one["ids"] = [vocabulary.get(name, one["ids"][0])]
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(raw))
    return tokenizer


def _templates(processor: Any) -> Iterator[dict[str, Any]]:
    """The special tokens that the steps after encoding add."""
    if isinstance(processor, dict):
        if "special_tokens" in processor:
            yield processor["special_tokens"]
        for one in processor.get("processors") or ():
            yield from _templates(one)
