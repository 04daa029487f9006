"""A tiny base whose time is no matter, and little memory to measure."""

import pytest
import torch
from transformers import LlamaConfig

from medusa import BaseModel, MedusaModel
from medusa.benchmarks.machine import BUFFER_BYTES
from medusa.benchmarks.step.shapes import random_heads, random_model


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setitem(BUFFER_BYTES, "cpu", 1 << 16)


@pytest.fixture(scope="session")
def tiny_config():
    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tiny_config, tokenizer):
    return BaseModel(random_model(tiny_config, torch.float32, torch.device("cpu")), tokenizer, "tiny")


@pytest.fixture
def tiny_model(tiny):
    return MedusaModel(tiny, random_heads(tiny, "recurrent", 4))
