"""Writes a Llama checkpoint as a file for llama.cpp: the same weights in bfloat16, without a real tokenizer."""

from pathlib import Path

import gguf
import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from medusa.files import replace_file


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write the file.

    Args:
        checkpoint: Directory of a transformers model with the type "llama".
        path: The file.

    Raises:
        ValueError: The model has another type.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    if config.model_type != "llama":
        raise ValueError(f"model type ({config.model_type}) of {checkpoint} is not llama; give another base")

    def write(target: Path) -> None:
        writer = gguf.GGUFWriter(target, "llama")
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        writer.add_tokenizer_model("none")
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for file in sorted(checkpoint.glob("model*.safetensors")):
            for key, weight in load_file(file).items():
                heads = turned.get(key.split(".")[-2])
                name = str(names.get_name(key, try_suffixes=(".weight",)))
                _add(writer, name, pairs_together(weight, heads) if heads else weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    replace_file(path, write)


def pairs_together(weight_OD: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix in llama.cpp's order: pairs of rotary embeddings are adjacent."""
    rows, columns = weight_OD.shape
    return weight_OD.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _add(writer: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    if weight.dim() == 1:  # norms
        writer.add_tensor(name, weight.float().numpy())
        return
    bits: numpy.ndarray = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
