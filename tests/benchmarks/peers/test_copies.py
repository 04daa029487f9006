"""Copies of a base for other engines: the same weights under other names."""

import os
import shutil

import gguf
import numpy
import pytest
import torch
from transformers import GPT2Config, LlamaForCausalLM

from medusa.base.names import full_name
from medusa.benchmarks.peers.copies import CHECKPOINT, OPENVINO, copies_of, copy_draft, directory_of, openvino_reads
from medusa.benchmarks.peers.gguf_file import pairs_together, write_gguf
from medusa.heads import HeadsConfig
from medusa.heads.layer import LayerConfig


@pytest.fixture
def checkpoint(tiny_config, tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_llama_cpps_file_holds_the_same_weights(checkpoint, tmp_path):
    write_gguf(checkpoint, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["llama.block_count"], fields["llama.attention.head_count_kv"]) == (2, 2)
    assert fields["llama.rope.freq_base"] == 10_000
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert len(tensors) == len(list(model.parameters()))

    def held(name):
        return torch.from_numpy(numpy.array(tensors[name].data)).view(torch.bfloat16)

    layer = model.model.layers[1]
    assert torch.equal(held("blk.1.ffn_down.weight"), layer.mlp.down_proj.weight)
    assert torch.equal(held("token_embd.weight"), model.lm_head.weight)
    assert torch.equal(held("blk.1.attn_k.weight"), pairs_together(layer.self_attn.k_proj.weight, 2))
    assert not torch.equal(held("blk.1.attn_k.weight"), layer.self_attn.k_proj.weight)


def test_numbers_that_are_turned_together_stand_beside_each_other():
    rows = torch.arange(8.0)[:, None]  # two heads of four: 0 turns with 2, 1 with 3
    assert pairs_together(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_other_architectures_are_refused(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model type \(gpt2\) .* is not llama; give another base"):
        write_gguf(tmp_path, tmp_path / "x.gguf")


def test_copies_are_found_by_every_name_of_a_base(tmp_path):
    assert directory_of(tmp_path, "embedded") == directory_of(tmp_path, full_name("embedded"))
    assert directory_of(tmp_path, "smollm2") == directory_of(tmp_path, "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert directory_of(tmp_path, "llama-1b").name == "llama-1b"


def test_copies_of_other_weights_are_refused(checkpoint, tmp_path):
    directory = directory_of(tmp_path, str(checkpoint))
    directory.mkdir(parents=True)
    (directory / CHECKPOINT).symlink_to(checkpoint)
    assert copies_of(tmp_path, str(checkpoint)) == directory
    moved = tmp_path / "elsewhere" / "base"
    shutil.copytree(checkpoint, moved)
    assert copies_of(tmp_path, str(moved)) == directory  # the same weights in another place
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"xy")
    with pytest.raises(ValueError, match=r"are of other weights than .*elsewhere/base; remove them, run benchmarks"):
        copies_of(tmp_path, str(moved))
    later = directory.stat().st_mtime + 60  # trained again in the same place
    os.utime(checkpoint / "model.safetensors", (later, later))
    with pytest.raises(ValueError, match="are of other weights"):
        copies_of(tmp_path, str(checkpoint))


def test_openvino_reads_plain_eagle_3_drafts_only():
    shape = {"hidden_size": 32, "vocab_size": 64, "num_heads": 2}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}

    def read(layers=(1, 2, 3), **norms):
        layer = LayerConfig(**sizes, **{"norm_features": False, "norm_output": False} | norms)
        return openvino_reads(HeadsConfig(**shape, architecture="attention", feature_layers=layers, layer=layer))

    assert read()
    assert not read(layers=(1, 2))
    assert not read(norm_output=True)
    assert not read(norm_heads=True)
    assert not openvino_reads(HeadsConfig(**shape))


def test_a_draft_for_openvino_is_converted_in_its_environment_and_gets_the_bases_ends(tmp_path):
    (tmp_path / "openvino/bin").mkdir(parents=True)
    python = tmp_path / "openvino/bin/python"
    python.write_text('#!/bin/sh\nmkdir "$3" && echo "$1 $2" > "$3/asked"\n')
    python.chmod(0o755)
    copy = tmp_path / "models/llama-1b" / OPENVINO
    copy.mkdir(parents=True)
    (copy / "generation_config.json").write_text('{"eos_token_id": 2}')
    there = copy_draft(tmp_path, "llama-1b", tmp_path / "draft", tmp_path / "target")
    assert (there / "asked").read_text().split()[1] == str(tmp_path / "draft")
    assert (there / "generation_config.json").read_text() == '{"eos_token_id": 2}'
