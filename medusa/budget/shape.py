"""What memory and time of a base follow from, read from its config alone: no weight is loaded."""

import copy
import math
from dataclasses import dataclass
from typing import Any

FLOAT32 = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a base. Weights are numbers, each counted once where layers share them."""

    name: str
    row_bytes: int
    """That a pass holds for each row at most: hidden states, a norm in float32, and what is between a layer's matrices.
    An estimate."""
    cached: int
    """Keys and values of a position, or what both are made of (latent attention), numbers in all layers together."""
    scored: int
    """Multiplications that the attention of all layers makes for a token and a position that it sees."""
    vocabulary: int
    """V."""
    context: int
    """Tokens of prompt and completion together."""
    layer_weights: int
    """In matrices of the layers, those of experts among them."""
    output_weights: int
    """In the output layer, V x D."""
    other_weights: int
    """Hardly read: embeddings that are not the output layer, norms, an image tower."""
    itemsize: int
    """Bytes of a number."""
    bits: int
    """Of a number in the layers' matrices, about: fewer than 8 x itemsize where they are quantised."""
    held: int = 0
    """Bytes of the weights in memory, where these are of several types; 0 = as ``bits`` and ``itemsize`` tell."""
    expert_weights: int = 0
    visited: float = 1.0
    """Share of a layer's experts that a token visits."""

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layer_weights + self.output_weights + self.other_weights

    @property
    def weight_bytes(self) -> int:
        """In memory."""
        return (
            self.held
            or self.layer_weights * self.bits // 8 + (self.output_weights + self.other_weights) * self.itemsize
        )

    @property
    def cached_bytes(self) -> int:
        """Of keys and values of a position."""
        return self.cached * self.itemsize


def read_shape(config: Any, dtype: Any = None, int8: bool = False) -> Shape:
    """The shape of a base with this config, counted on the model that transformers builds of it, without memory.

    Args:
        config: Of transformers.
        dtype: torch.dtype of the weights; None = the config's, or float32.
        int8: Matrices of the layers are rounded to 8 bits.

    Raises:
        ValueError: It is no causal language model with keys and values, or what its experts or its quantisation take
            is not known.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from medusa.base.context import context_length
    from medusa.cpu.experts import have_known_form

    text, name = config.get_text_config(), config.name_or_path or config.model_type
    dtype = dtype or config.dtype or text.dtype or torch.float32
    bare = copy.deepcopy(config)
    if hasattr(bare, "quantization_config"):
        del bare.quantization_config
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(bare, dtype=dtype)
    model.tie_weights()
    output, inside = model.get_output_embeddings().weight, model.get_decoder().named_parameters()
    tables = {output} | {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = {key: weight for key, weight in inside if weight.dim() >= 2 and weight not in tables}
    layers = sum(weight.numel() for weight in matrices.values())
    experts = sum(weight.numel() for key, weight in matrices.items() if ".experts." in key)
    others = [one for key, one in model.named_modules() if key.endswith(".experts") and not have_known_form(one)]
    unrounded = sum(weight.numel() for one in others for weight in one.parameters(recurse=False)) if int8 else 0
    rest = sum(weight.numel() for weight in model.parameters()) - layers - output.numel()
    total, active = _experts(text, name) if experts else (1, 1)
    widest = max(max(one.shape[-2:]) * (active if ".experts." in key else 1) for key, one in matrices.items())
    cached, scored = _attention(model, text, name)
    return Shape(
        name=name,
        row_bytes=dtype.itemsize * (2 * text.hidden_size + 3 * widest) + 2 * FLOAT32 * text.hidden_size,
        cached=cached,
        scored=scored,
        vocabulary=text.vocab_size,
        context=context_length(text, name),
        layer_weights=layers,
        output_weights=output.numel(),
        other_weights=rest,
        itemsize=dtype.itemsize,
        bits=8 if int8 else _bits(config, name) or 8 * dtype.itemsize,
        held=unrounded and layers - unrounded + (unrounded + output.numel() + rest) * dtype.itemsize,
        expert_weights=experts,
        visited=active / total,
    )


def _attention(model: Any, config: Any, name: str) -> tuple[int, int]:
    """``cached`` and ``scored`` of a ``Shape``."""
    from medusa.attention.trial import head_size

    cached, scored = 0, 0
    for layer in model.modules():
        dim = head_size(layer)
        if dim is not None:
            both = dim + (getattr(layer, "v_head_dim", None) or dim)
            groups, latent = getattr(layer, "num_key_value_groups", None) or 1, getattr(layer, "kv_lora_rank", None)
            if not getattr(layer, "is_kv_shared_layer", False):  # Gemma 4: it reads those of an earlier layer
                cached += latent + layer.qk_rope_head_dim if latent else config.num_attention_heads // groups * both
            scored += config.num_attention_heads * both
    if not scored:
        raise ValueError(f"base ({name}) has no layer with keys and values; give a transformer")
    return cached, scored


def _experts(config: Any, name: str) -> tuple[int, int]:
    """Experts of a layer, and those that a token visits."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((count for key in names if (count := getattr(config, key, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    if not total or not active:
        raise ValueError(f"experts of the base ({name}) are not counted in its config; plan for a base without experts")
    return int(total), int(active)


def _bits(config: Any, name: str) -> int | None:
    """Of a weight of the layers; None = it is not quantised."""
    from medusa.base import mx_experts
    from medusa.base.group_layouts import bits_and_sizes

    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return None
    told = quantised if isinstance(quantised, dict) else quantised.to_dict()
    bits = told.get("bits") or (4 if told.get("load_in_4bit") else None)
    if told.get("quant_method") == mx_experts.METHOD:
        return math.ceil(mx_experts.BITS)
    bits = bits or (8 if told.get("load_in_8bit") or told.get("quant_method") == "fp8" else None)
    if bits is None and told.get("config_groups"):
        bits = max(each for each, _ in bits_and_sizes(told))
    if bits is None:
        raise ValueError(
            f"quantisation ({told.get('quant_method')}) of the base ({name}) does not state its bits; take"
            " quantization_config out of config.json and plan for plain weights"
        )
    return int(bits)
