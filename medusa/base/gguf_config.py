"""What a GGUF file says of its model and transformers does not read: how positions turn, and how turns end."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medusa.base.gguf_tensors import Stored

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
"""Tokens that end a turn in well-known chat formats, as llama.cpp knows them by their texts."""
LOW, HIGH = 1.0, 4.0
"""Llama 3's frequency factors, which all of its releases share."""


def complete_config(values: Mapping[str, Any], header: Mapping[str, Any], stored: Sequence[Stored]) -> PretrainedConfig:
    """The config of a file's model.

    Args:
        values: The values that transformers reads.
        header: Single values of the file's header.
        stored: Its tensors.

    Raises:
        ValueError: Its positions turn in a way that is not known.
    """
    family, values = str(header.get("general.architecture", "unknown")), dict(values)
    if family == "llama":  # a file whose name is "mistral" too
        values["model_type"] = family
    if family == "qwen3" and (size := header.get("qwen3.attention.key_length")):
        values["head_dim"] = size
    if family in ("qwen2moe", "qwen3moe"):  # widths of experts are those of transformers' defaults otherwise
        widths = {one.name: one.shape[-1] for one in stored}
        for name, own in (("exps", "moe_intermediate_size"), ("shexp", "shared_expert_intermediate_size")):
            if width := widths.get(f"blk.0.ffn_down_{name}.weight"):
                values[own] = width
    if family == "phi3" and (turned := header.get("phi3.rope.dimension_count")):
        values["partial_rotary_factor"] = turned * values["num_attention_heads"] / values["hidden_size"]
    told = {name.removeprefix(f"{family}.rope."): value for name, value in header.items()}
    factors = {one.name: one.numbers().flatten() for one in stored if one.name.startswith("rope_f")}
    if factors.get("rope_freqs.weight", np.ones(1)).max() > 1:
        scaling = _llama3(torch.tensor(factors["rope_freqs.weight"]), float(values.get("rope_theta", 10_000.0)))
    elif "rope_factors_long.weight" in factors:
        original = told.get("scaling.original_context_length")
        values["original_max_position_embeddings"] = original
        scaling = {
            "rope_type": "longrope",
            **{f"{name}_factor": factors[f"rope_factors_{name}.weight"].tolist() for name in ("long", "short")},
            "attention_factor": told.get("scaling.attn_factor"),
            "original_max_position_embeddings": original,
        }
    else:
        kind = told.get("scaling.type") or ("linear" if "scale_linear" in told else "none")
        if kind not in ("none", "linear", "yarn"):
            raise ValueError(f"its positions are scaled in a way that is not known ({kind})")
        factor = told.get("scaling.factor") or told.get("scale_linear")
        scaling = {"rope_type": kind, "factor": factor} if kind != "none" else {}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = told.get("scaling.original_context_length")
    if scaling:
        values["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
    config: PretrainedConfig = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    return config


def _llama3(factors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, from the factors on the wavelengths of its positions.

    Raises:
        ValueError: It does not give these factors.
    """
    dim, factor = 2 * len(factors), float(factors.max())
    lengths = 2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    between = ((factors > 1.0) & (factors < factor)).nonzero()
    original = 8192
    if len(between):  # factors between both ends tell how long the first context was
        place = int(between[0])
        share = (1 / float(factors[place]) - 1 / factor) / (1 - 1 / factor)
        original = round(float(lengths[place]) * (share * (HIGH - LOW) + LOW))
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = CONFIG_MAPPING["llama"](head_dim=dim, rope_parameters={"rope_theta": theta, **scaling})
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    if not torch.allclose(2 * math.pi / (frequencies * lengths), factors.double(), rtol=1e-3):
        raise ValueError("its rope_freqs are not those of a Llama 3")
    return scaling


def ends_of(header: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer."""
    told = [header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = tokenizer.get_vocab()
    return sorted({token for token in (*told, *map(known.get, TURN_ENDS)) if token is not None})
