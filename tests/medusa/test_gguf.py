"""GGUF files as bases: what is found by a name, read tensor by tensor as transformers reads the whole, and refused."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from medusa.base import gguf, gguf_convert, gguf_reading, gguf_tensors
from medusa.cpu.packed import KINDS
from tests.medusa.gguf_files import write_file

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "gemma3": Gemma3TextConfig, "qwen3moe": Qwen3MoeConfig}


def expanded(file):
    how = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **how)


def check(directory, whole):
    read = gguf.load(directory, torch.bfloat16, expand=True)
    assert read.state_dict().keys() == whole.state_dict().keys()
    for name, weight in whole.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    assert read.config.to_diff_dict() == whole.config.to_diff_dict()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "F16", "BF16"])
def test_every_number_is_that_of_transformers(family, kind, tokenizer, tmp_path, monkeypatch):
    file = write_file(tmp_path / "small.gguf", family, FAMILIES[family], tokenizer, kind)
    whole = expanded(file)
    monkeypatch.setattr(gguf_reading.Reading, "whole", None)
    monkeypatch.setattr(gguf_convert, "SHARD", 20_000)
    monkeypatch.setattr(gguf_tensors, "SLICE", 3_000)
    monkeypatch.setattr(gguf_convert, "SLICE", 3_000)
    told = gguf_convert.convert(file, tmp_path / "base")
    assert ("kept packed" in told) == (kind in KINDS)
    assert len(list((tmp_path / "base").glob(gguf.WEIGHTS))) > 2
    check(tmp_path / "base", whole)


def test_a_family_that_is_read_as_a_whole_has_the_same_numbers(tokenizer, tmp_path, monkeypatch):
    file = write_file(tmp_path / "small.gguf", "llama", LlamaConfig, tokenizer)
    monkeypatch.setattr(gguf_reading.Reading, "singly", lambda self: False)
    assert "Q4_1 kept packed" in gguf_convert.convert(file, tmp_path / "base")
    check(tmp_path / "base", expanded(file))
