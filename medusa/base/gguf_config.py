"""What a GGUF file says of its model: the config, with how positions turn, and how turns end."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medusa.base.gguf_families import FAMILIES, Family, family_of
from medusa.base.gguf_settings import SETTINGS
from medusa.base.gguf_tensors import Stored

TURN_ENDS = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
}  # fmt: skip
"""Tokens that end an answer, as llama.cpp knows them by their texts; not </s>, which in some vocabularies is HTML."""
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""llama.cpp's names of YaRN's numbers, with transformers' names; it does not look at ``yarn_attn_factor``."""
LOW, HIGH = 1.0, 4.0
"""Llama 3's frequency factors, which all of its releases share; Llama 4's are both ``LOW``."""


def read_config(file: Path, header: Mapping[str, Any], stored: Sequence[Stored]) -> PretrainedConfig:
    """The config of a file's model.

    Args:
        file: The file.
        header: The values of its header.
        stored: Its tensors.

    Raises:
        ValueError: Its family is not known, or its positions turn in a way that is not known.
    """
    shapes = {one.name: one.shape for one in stored}
    family, name = family_of(header, shapes), str(header.get("general.architecture", "unknown"))
    told = {key.removeprefix(f"{name}."): value for key, value in header.items() if value is not None}
    if family in FAMILIES:
        values = _settings(FAMILIES[family], told, shapes)
    elif name in GGUF_CONFIG_ARCHS:
        values, _ = PretrainedConfig.get_config_dict(file.parent, gguf_file=file.name)
    else:
        known = ", ".join(sorted({*FAMILIES, *GGUF_CONFIG_ARCHS}))
        raise ValueError(f"its family ({name}) is not known; known are {known}")
    values |= _positions(family, told, values, {one.name: one.numbers() for one in stored if one.name in FACTORS})
    config: PretrainedConfig = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    return config


def _settings(family: Family, told: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A config's values, but for how positions turn."""
    names = {stored.partition(".")[2].partition(".")[2]: shape for stored, shape in shapes.items()}  # in some layer
    values = {own: told[name] for name, own in SETTINGS.items() if name in told}
    values["sliding_window"] = values.get("sliding_window") or None
    for name in ("num_key_value_heads", "intermediate_size"):
        if isinstance(values.get(name), list):  # one for each layer
            values[name] = max(values[name])
    for name, own in (("exps", "moe_intermediate_size"), ("shexp", "shared_expert_intermediate_size")):
        if shape := names.get(f"ffn_down_{name}.weight"):  # old files do not tell
            values.setdefault(own, shape[-1])
    heads = values["num_attention_heads"]
    values.setdefault("num_key_value_heads", heads)
    if keys := names.get("attn_k.weight"):
        values.setdefault("head_dim", keys[0] // values["num_key_value_heads"])
    heads_fit = values.get("head_dim") == values["hidden_size"] // heads
    layers = Counter(stored.rpartition(".attn_")[2] for stored in shapes)
    values |= {
        "attention_k_eq_v": layers["v.weight"] < layers["k.weight"],
        "attention_bias": "attn_q.bias" in names,
        "use_qkv_bias": "attn_q.bias" in names,
        "use_qk_norm": "attn_q_norm.weight" in names,
        "mlp_bias": "ffn_up.bias" in names,
        "mamba_rms_norm": "ssm_norm.weight" in names,
        "qk_layernorm": "attn_q_norm.weight" in names,
        "use_parallel_residual": "ffn_norm.weight" not in names,
    }
    usual = CONFIG_MAPPING[family.model_type]()
    known = {*dir(usual), *usual.attribute_map, "rope_theta"} | (set() if heads_fit else {"head_dim"})
    if hasattr(usual, "rope_parameters"):
        values.setdefault("rope_theta", 10_000.0)
    values = {name: value for name, value in values.items() if name in known}
    values |= {own: told[name] for name, own in family.settings.items() if name in told}
    values |= {
        "model_type": family.model_type,
        "vocab_size": shapes["token_embd.weight"][0] if "token_embd.weight" in shapes else None,
        "num_hidden_layers": told["block_count"] - told.get("nextn_predict_layers", 0),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    for kind in ("bos", "eos", "pad"):
        values[f"{kind}_token_id"] = told.get(f"tokenizer.ggml.{'padding' if kind == 'pad' else kind}_token_id")
    return values | dict(family.more(told, values))


def _positions(
    family: str, told: Mapping[str, Any], values: Mapping[str, Any], factors: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, Any]:
    """The values that say how positions turn.

    Args:
        family: The family.
        told: The header's values.
        values: The config's other values.
        factors: Factors on the wavelengths of positions.
    """
    if "rope_parameters" in values:
        return {}
    found = dict[str, Any]()
    turned, size = told.get("rope.dimension_count"), values.get("head_dim")
    size = size or values["hidden_size"] // values["num_attention_heads"]
    if turned and turned <= size and family in FAMILIES and "partial_rotary_factor" not in values:
        found["partial_rotary_factor"] = turned / size
    if factors.get("rope_freqs.weight", np.ones(1)).max() > 1:
        theta = float(values.get("rope_theta", 10_000.0))
        scaling = _llama3(torch.tensor(factors["rope_freqs.weight"]).flatten(), theta)
    elif "rope_factors_long.weight" in factors:
        original = found["original_max_position_embeddings"] = told.get("rope.scaling.original_context_length")
        scaling = {
            "rope_type": "longrope",
            **{
                f"{name}_factor": factors[f"rope_factors_{name}.weight"].flatten().tolist()
                for name in ("long", "short")
            },
            "attention_factor": told.get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": original,
        }
    else:
        kind = told.get("rope.scaling.type") or ("linear" if "rope.scale_linear" in told else "none")
        if kind not in ("none", "linear", "yarn"):
            raise ValueError(f"its positions are scaled in a way that is not known ({kind})")
        factor = told.get("rope.scaling.factor") or told.get("rope.scale_linear")
        scaling = {"rope_type": kind, "factor": factor} if kind != "none" else {}
        if kind == "yarn":
            scaling |= {own: told.get(f"rope.scaling.{name}") for name, own in YARN.items()}
            scaling |= _yarn(family, told)
    if scaling:
        found["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
    return found


def _yarn(family: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """What some families add to YaRN."""
    if family == "gpt-oss":
        return {"truncate": False}
    # DeepSeek's files hold a tenth of it, for old versions of llama.cpp.
    scale = told.get("rope.scaling.yarn_log_multiplier", 0.0) * (10 if family in ("deepseek2", "deepseek_v2") else 1)
    found = {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return found | {"llama_4_scaling_beta": told.get("attention.temperature_scale") or None}


def _llama3(factors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, from the factors on the wavelengths of its positions.

    Raises:
        ValueError: It does not give these factors.
    """
    dim, factor = 2 * len(factors), float(factors.max())
    lengths = 2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    between = ((factors > 1.0) & (factors < factor)).nonzero()
    original, high = 8192, LOW
    if len(between):  # factors between both ends tell how long the first context was
        place, high = int(between[0]), HIGH
        share = (1 / float(factors[place]) - 1 / factor) / (1 - 1 / factor)
        original = round(float(lengths[place]) * (share * (HIGH - LOW) + LOW))
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = CONFIG_MAPPING["llama"](head_dim=dim, rope_parameters={"rope_theta": theta, **scaling})
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    if not torch.allclose(2 * math.pi / (frequencies * lengths), factors.double(), rtol=1e-3):
        raise ValueError("its rope_freqs are not those of a Llama 3 or 4")
    return scaling


def ends_of(header: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, size: int) -> list[int]:
    """Tokens that end an answer.

    Args:
        header: The values of the file's header.
        tokenizer: Its tokenizer, to which transformers adds <|endoftext|> if it names no special tokens.
        size: The model's number of tokens.
    """
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    known = {text: token for text, token in tokenizer.get_vocab().items() if token < size}
    told = {header.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    ends = {known[text] for text in TURN_ENDS & known.keys()}
    if known.keys() & {"<|call|>", "<|calls|>"}:  # there <|end|> ends a message, and others follow in the same turn
        ends -= {known.get("<|end|>")}
    return sorted(token for token in told | ends if token is not None)
