"""A tiny random Llama with a byte tokenizer, and samples for it."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<end>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<end>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 conversations whose answers repeat, so that heads have something to learn."""
    path = tmp_path_factory.mktemp("samples") / "train.jsonl"
    records = [{"prompt": f"say {n}", "response": f"{n} " * (3 + n % 7) + "abcdefgh " * 3} for n in range(64)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
