"""Steps from the tensors of a GGUF file to those of a model: what undoes the changes of llama.cpp's converter.

It turns the rows of Llama's queries and keys, adds 1 to Gemma's norms, and stacks the experts of a layer; experts come
in the order of the kernel (``medusa.cpu.experts``).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform
from transformers.integrations.gguf import gguf_conversion_mapping as theirs

Steps = Callable[[PretrainedConfig], Sequence[WeightTransform]]


def renaming(stored: str, own: str) -> WeightRenaming:
    """A part of a name, or with no dot in front its beginning, becomes another."""
    return WeightRenaming(("" if stored.startswith(".") else "^") + re.escape(stored), own)


def change(stored: str | Sequence[str], own: str, *operations: ConversionOps) -> WeightTransform:
    """Tensors with these parts in their names, as renamings leave them, become one."""
    parts = [stored] if isinstance(stored, str) else stored
    if not operations:
        return WeightRenaming([re.escape(one) for one in parts], own)
    return WeightConverter(
        source_patterns=[re.escape(one) for one in parts], target_patterns=own, operations=operations
    )


class Reshape(ConversionOps):
    """Give a tensor another shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    @torch.no_grad()
    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        """The tensor in this shape."""
        (tensor,) = input_dict.values()
        return {target_patterns[0]: tensor.reshape(self.shape)}


class JoinHeads(ConversionOps):
    """Join [H, L, K] and [H, V, L], for keys and values of H heads, to DeepSeek's ``kv_b_proj`` [H * (K + V), L]."""

    @torch.no_grad()
    def convert(self, input_dict: Any, source_patterns: list[str], target_patterns: list[str], **_: Any) -> Any:
        """The joined tensor."""
        keys, values = (input_dict[name] for name in source_patterns)
        return {target_patterns[0]: torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)}


def turned(config: PretrainedConfig, module: str = "self_attn") -> list[WeightTransform]:
    """Rows of queries and keys stand in pairs of neighbours in the file, and in halves of a head in the model."""

    def back(heads: int, size: int) -> ConversionOps:
        return theirs.PermuteRows(torch.arange(heads * size).view(heads, -1, 2).transpose(1, 2).flatten())

    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [
        change(f".{module}.{name}_proj.{kind}", f".{module}.{name}_proj.{kind}", back(count, size))
        for name, count in (("q", heads), ("k", config.num_key_value_heads))
        for kind in ("weight", "bias")
    ]


def less_one(*norms: str) -> Steps:
    """These norms are 1 larger in the file."""
    return lambda config: [change(f"{norm}.weight", f"{norm}.weight", theirs.SubtractOne()) for norm in norms]


def experts(module: str = "mlp.experts", *after: ConversionOps) -> Steps:
    """Experts of a layer, in this module, with further changes of their weights."""
    rows = theirs.ConcatenateRows(dim=1)
    return lambda config: [
        change((".ffn_gate_exps.weight", ".ffn_up_exps.weight"), f".{module}.gate_up_proj", rows, *after),
        change(".ffn_gate_up_exps.weight", f".{module}.gate_up_proj", *after),  # as some converters write them
        change((".ffn_gate_exps.bias", ".ffn_up_exps.bias"), f".{module}.gate_up_proj_bias", rows),
        change(".ffn_down_exps.weight", f".{module}.down_proj", *after),
        change(".ffn_down_exps.bias", f".{module}.down_proj_bias"),
    ]


def both(*steps: Steps) -> Steps:
    """Several lists of steps."""
    return lambda config: [one for some in steps for one in some(config)]


def shared_gate(config: PretrainedConfig) -> list[WeightTransform]:
    """The gate of a shared expert, which some files hold as a vector."""
    name = ".mlp.shared_expert_gate.weight"
    return [change(name, name, Reshape(1, -1))]


def mamba(config: PretrainedConfig, module: str = "mamba") -> list[WeightTransform]:
    """The tensors of a Mamba 2 layer."""
    return [
        change(".ssm_a", f".{module}.A_log", theirs.LogNegate(), Reshape(-1)),
        change(".ssm_d", f".{module}.D", Reshape(-1)),
        change(".ssm_norm.weight", f".{module}.norm.weight", Reshape(-1)),
        change(".ssm_conv1d.weight", f".{module}.conv1d.weight", theirs.Unsqueeze(1)),
        change(".ssm_conv1d.bias", f".{module}.conv1d.bias"),
        change(".ssm_dt.bias", f".{module}.dt_bias"),
        change(".ssm_in.weight", f".{module}.in_proj.weight"),
        change(".ssm_out.weight", f".{module}.out_proj.weight"),
    ]


def mixers(config: PretrainedConfig) -> list[WeightTransform]:
    """Nemotron-H's layers, each of which is of one kind."""
    return [*turned(config, "mixer"), *mamba(config, "mixer")]


def delta(config: PretrainedConfig) -> list[WeightTransform]:
    """Qwen 3 Next's delta rule: rows stand by key head in the model, and by what they are for in the file."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    places = torch.arange(heads * 2 * (size + values)).split([heads * one for one in (size, size, values, values)])
    order = torch.cat([one.view(heads, -1) for one in places], 1).flatten()
    return [
        change(
            (".attn_qkv.weight", ".attn_gate.weight"),
            ".linear_attn.in_proj_qkvz.weight",
            theirs.ConcatenateRows(dim=0),
            theirs.PermuteRows(order),
        ),
        change(".linear_attn.A_log", ".linear_attn.A_log", theirs.LogNegate()),
        change(".linear_attn.conv1d.weight", ".linear_attn.conv1d.weight", theirs.Unsqueeze(1)),
    ]


def latent(config: PretrainedConfig) -> list[WeightTransform]:
    """Keys and values of DeepSeek's attention, which the file holds apart."""
    return [change((".attn_k_b.weight", ".attn_v_b.weight"), ".self_attn.kv_b_proj.weight", JoinHeads())]


def convolution(config: PretrainedConfig) -> list[WeightTransform]:
    """LFM2's short convolutions."""
    return [change(".shortconv.conv.weight", ".conv.conv.weight", theirs.Unsqueeze(1))]
