"""The tokenizer of a GGUF file: each token has its id, and texts are split as in llama.cpp."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

logger = logging.getLogger(__name__)

TOKENS = "tokenizer.ggml.tokens"
CONTROL, USER_DEFINED = 3, 4
"""llama.cpp's types of tokens that are found whole in a text."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}%s]+%s|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = (r"\p{N}", GPT2)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
CODER = (
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+", r"\p{N}"
)  # fmt: skip
LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+",
    r"\p{N}+",
)
"""Its letters are nearly llama.cpp's, which leave out some scripts."""
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4"), (GPT2,)),
    "default": DEFAULT,
    "deepseek-llm": LLM,
    "deepseek-coder": CODER,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (WORDS % (3, "", r"[\r\n]*"),)),
    **dict.fromkeys(("stablelm2", "hunyuan"), (WORDS % (1, "", r"[\r\n]*"),)),
    "seed-coder": (WORDS % (1, r"\r\n", ""),),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK),
}
"""How a text is split before tokens are merged, one expression after the other, by llama.cpp's names (llama-vocab.cpp).

transformers has others, and takes GPT-2's for those that it does not know.
"""
BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Vocabularies whose texts begin with a token of their own, unless the file says otherwise, by the same names."""
WHOLE = (*BEGUN, "glm4")
"""Vocabularies that take a part of a text whole where they hold it, also if no merges make it, by the same names."""


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a file.

    transformers respells tokens with characters that byte-level vocabularies do not have, as DeepSeek's control tokens:
    they would be split, and their names would get new ids, which the model does not have.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    tokenizer: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(file.parent, gguf_file=file.name)
    told, _ = read_gguf_metadata(str(file), (TOKENS,))
    _split(tokenizer, told)
    if (told.get("general.architecture"), told.get("tokenizer.ggml.model")) == ("phi3", "llama"):
        _strip(tokenizer)
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
    spelled = {spelling for spelling, number in vocabulary.items() if number in wrong}
    for spelling in spelled:
        del vocabulary[spelling]
    # Some were spelled as others are: GPT-NeoX has spaces as such beside those of its merges.
    vocabulary |= {name: number for number, name in enumerate(told[TOKENS]) if name in spelled or number in wrong}
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


def _split(tokenizer: PreTrainedTokenizerBase, told: Mapping[str, Any]) -> None:
    """Split texts as llama.cpp does.

    SentencePiece's vocabularies get a space in front of a text and behind each control token, also where there is one.
    transformers leaves it out there.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    backend = tokenizer.backend_tokenizer
    byte_level = told.get("tokenizer.ggml.model") == "gpt2"
    name = told.get("tokenizer.ggml.pre", "default") if byte_level else ""
    if name in WHOLE:
        backend.model.ignore_merges = True
    if name in BEGUN and "tokenizer.ggml.add_bos_token" not in told:
        tokenizer.add_bos_token = True
    if splits := SPLITS.get(name):
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    elif byte_level and name not in GGUF_PRE_TOKENIZER_SPLITS:
        said = "how this GGUF file's texts are split (%s) is not known; they are split as GPT-2's, and ids may differ"
        logger.warning(said, name)
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        begun = [normalizers.Prepend("\u2581")] if told.get("tokenizer.ggml.add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*begun, normalizers.Replace(" ", "\u2581")])
        backend.pre_tokenizer = None


def _strip(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let Phi 3's control tokens take the spaces and ends of lines behind them, as the files do not say."""
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    for one in raw["added_tokens"]:
        one["rstrip"] = one["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(raw))


def _templates(processor: Any) -> Iterator[dict[str, Any]]:
    """The special tokens that the steps after encoding add."""
    if isinstance(processor, dict):
        if "special_tokens" in processor:
            yield processor["special_tokens"]
        for one in processor.get("processors") or ():
            yield from _templates(one)
