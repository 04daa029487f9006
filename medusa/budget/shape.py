"""What memory and time of a base follow from, read from its config alone: no weight is loaded."""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

KNOWN_BITS = {"load_in_4bit": 4, "load_in_8bit": 8}
"""Flags of a bitsandbytes config, and the bits that a weight has then."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a base. Weights are numbers, each counted once where layers share them."""

    name: str
    layers: int
    hidden: int
    """D."""
    inner: int
    """Numbers between the matrices of an MLP, for a row; those of all experts that it visits."""
    attention: int
    """Queries, keys, values and outputs of a layer, numbers for a row."""
    cached: int
    """Keys and values of a position, or what both are made of (latent attention), numbers in all layers together."""
    scored: int
    """Multiplications that the attention of all layers makes for a row and a position that it sees."""
    vocabulary: int
    """V."""
    context: int
    """Tokens of prompt and completion together."""
    layer_weights: int
    """In matrices of the layers, those of experts among them."""
    output_weights: int
    """In the output layer, V x D."""
    other_weights: int
    """Read for a few rows only, or hardly any: embeddings that are not the output layer, norms, an image tower."""
    itemsize: int
    """Bytes of a number."""
    bits: int
    """Of a number in the layers' matrices: fewer than 8 x itemsize where they are quantised."""
    expert_weights: int = 0
    """In experts; a row is multiplied with ``active`` / ``experts`` of them."""
    experts: int = 1
    """Of a layer."""
    active: int = 1
    """Experts of a layer that a row visits."""

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layer_weights + self.output_weights + self.other_weights

    @property
    def weight_bytes(self) -> int:
        """In memory."""
        return self.layer_weights * self.bits // 8 + (self.output_weights + self.other_weights) * self.itemsize

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

    text, name = config.get_text_config(), config.name_or_path or config.model_type
    dtype = dtype or config.dtype or text.dtype or torch.float32
    bits = 8 if int8 else _bits(config, name, 8 * dtype.itemsize)
    bare = copy.deepcopy(config)
    if hasattr(bare, "quantization_config"):
        del bare.quantization_config
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(bare, dtype=dtype)
    model.tie_weights()
    output, tables = model.get_output_embeddings().weight, {model.get_output_embeddings().weight}
    tables |= {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    inside = [(key, weight) for key, weight in model.get_decoder().named_parameters() if weight not in tables]
    matrices = {key: weight.numel() for key, weight in inside if weight.dim() >= 2}
    experts = sum(numbers for key, numbers in matrices.items() if ".experts." in key)
    total, active = _experts(text, name) if experts else (1, 1)
    layers = _attention_layers(model, text, name)
    return Shape(
        name=name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=_inner(text, active if experts else 0),
        attention=max(layer.width for layer in layers),
        cached=sum(layer.cached for layer in layers),
        scored=sum(layer.scored for layer in layers),
        vocabulary=text.vocab_size,
        context=context_length(text, name),
        layer_weights=sum(matrices.values()),
        output_weights=output.numel(),
        other_weights=sum(weight.numel() for weight in model.parameters()) - sum(matrices.values()) - output.numel(),
        itemsize=dtype.itemsize,
        bits=bits,
        expert_weights=experts,
        experts=total,
        active=active,
    )


class _Attention(NamedTuple):
    """Numbers of a layer: for a row, for a position in the cache, and for both together (see ``Shape``)."""

    width: int
    cached: int
    scored: int


def _attention_layers(model: Any, config: Any, name: str) -> list[_Attention]:
    """Those that keep keys and values."""
    layers = []
    for layer in model.modules():
        # DeepSeek's latent attention, GPT-NeoX, and all others.
        dim = next((size for key in ("qk_head_dim", "head_size", "head_dim") if (size := getattr(layer, key, 0))), 0)
        if isinstance(dim, int) and dim and isinstance(getattr(layer, "layer_idx", None), int):
            both = dim + (getattr(layer, "v_head_dim", None) or dim)
            heads = int(config.num_attention_heads)
            keys_values = heads // (getattr(layer, "num_key_value_groups", None) or 1) * both
            latent = getattr(layer, "kv_lora_rank", None)
            cached = latent + layer.qk_rope_head_dim if latent else keys_values
            layers.append(_Attention(heads * both + keys_values, cached, heads * both))
    if not layers:
        raise ValueError(f"base ({name}) has no layer with keys and values; give one that is a transformer")
    return layers


def _inner(config: Any, active: int) -> int:
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = int(next((size for name in names if (size := getattr(config, name, None))), 4 * config.hidden_size))
    return max(inner, active * int(getattr(config, "moe_intermediate_size", None) or inner))


def _experts(config: Any, name: str) -> tuple[int, int]:
    """Experts of a layer, and those that a row visits."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((count for key in names if (count := getattr(config, key, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    if not total or not active:
        raise ValueError(f"experts of the base ({name}) are not counted in its config; plan for a base without experts")
    return int(total), int(active)


def _bits(config: Any, name: str, plain: int) -> int:
    """Of a weight of the layers."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return plain
    told = quantised if isinstance(quantised, dict) else quantised.to_dict()
    bits = told.get("bits") or next((bits for flag, bits in KNOWN_BITS.items() if told.get(flag)), None)
    bits = bits or (8 if told.get("quant_method") == "fp8" else None)
    if bits is None:
        raise ValueError(
            f"quantisation ({told.get('quant_method')}) of the base ({name}) does not tell its bits; take"
            " quantization_config out of config.json and plan for plain weights"
        )
    return int(bits)
