"""The decoder layer of EAGLE-3 drafts in other projects' formats: names of its tensors, and config keys of its shape.

D is the hidden size, n the number of the base's layers that it reads, V its vocabulary:

``fc.weight`` [D, n D]; ``layers.0`` with the names of a Llama or Qwen 3 layer, whose q, k and v projections read
[``input_layernorm``(embedding); ``hidden_norm``(state)]; ``norm.weight``; ``lm_head.weight`` [V, D]; and if V is a
part of the vocabulary, ``d2t`` int64 [V], token id minus index, and ``t2d`` bool [vocabulary]. With
``norm_before_fc``: ``input_norm.weight`` [n D]; with ``fc_norm``: n times ``fc_norm.{i}.weight`` [D].
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from medusa.formats.base import Export
from medusa.formats.draft import base_of, ids_and_order, vocabulary_tensors
from medusa.formats.vllm import base_output
from medusa.heads.layer import ROTARY, LayerConfig

NAMES = {
    "fusion": "fc",
    "token_norm": "layers.0.input_layernorm",
    "state_norm": "layers.0.hidden_norm",
    "mlp_norm": "layers.0.post_attention_layernorm",
    "output_norm": "norm",
    **{f"{name}_proj": f"layers.0.self_attn.{name}_proj" for name in "qkvo"},
    **{f"{name}_proj": f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""The format's names of our modules."""
SIZES = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "attention_bias",
)  # fmt: skip
"""Config keys of the layer that are the same in both configs."""
NOT_READ = ("embed_tokens.weight", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors of the base, or that follow from others."""


def _names(layer: LayerConfig) -> Iterator[tuple[str, str]]:
    """Names of our tensors that the format has too, and its names of them."""
    for ours, theirs in NAMES.items():
        yield f"{ours}.weight", f"{theirs}.weight"
    if layer.norm_heads:
        yield "query_norm.weight", "layers.0.self_attn.q_norm.weight"
        yield "key_norm.weight", "layers.0.self_attn.k_norm.weight"
    if layer.attention_bias:
        yield from ((f"{name}_proj.bias", f"layers.0.self_attn.{name}_proj.bias") for name in "qkvo")


def tensors_of(export: Export, name: str) -> dict[str, Tensor]:
    """The heads' tensors by the format's names; a copy of the base's output layer includes the heads' gain.

    Args:
        export: Attention heads that read layers of the base.
        name: Name of the format, for errors.
    """
    heads, layer = export.heads, export.heads.config.layer
    assert layer is not None, "attention heads have one"
    state, ids_V = heads.state_dict(), heads.draft_ids
    tensors = {theirs: state[ours] for ours, theirs in _names(layer)}
    if layer.norm_features and layer.norm_jointly:
        tensors["input_norm.weight"] = state["feature_norm"].flatten()
    elif layer.norm_features:
        tensors |= {f"fc_norm.{index}.weight": norm.clone() for index, norm in enumerate(state["feature_norm"])}
    if heads.lm_heads is not None:
        tensors["lm_head.weight"] = state["lm_heads"][0]
    else:
        output, scale = base_output(export, name), base_of(export, name).output.scale
        rows = output if ids_V is None else output[ids_V.to(output.device)]
        tensors["lm_head.weight"] = rows.to(state["gain"]) * state["gain"] * scale
    return tensors | vocabulary_tensors(heads)


def state_of(tensors: Mapping[str, Tensor], layer: LayerConfig, vocab_size: int) -> dict[str, Tensor]:
    """The state dict of ``AttentionHeads`` from the format's tensors.

    Embeddings are the base's and are left out. Without an output layer, heads share the base's. Columns are sorted by
    token id.

    Raises:
        KeyError: A tensor is missing.
        ValueError: There are tensors that such a layer does not have.
    """
    known = {name.replace("midlayer.", "layers.0."): tensor.clone() for name, tensor in tensors.items()}
    for base in NOT_READ:
        known.pop(base, None)
    state = {ours: known.pop(theirs) for ours, theirs in _names(layer)}
    if layer.norm_features:
        layers = state["fusion.weight"].shape[1] // len(state["fusion.weight"])
        if layer.norm_jointly:
            state["feature_norm"] = known.pop("input_norm.weight").unflatten(0, (layers, -1))
        else:
            state["feature_norm"] = torch.stack([known.pop(f"fc_norm.{index}.weight") for index in range(layers)])
    output, offsets_V = known.pop("lm_head.weight", None), known.pop("d2t", None)
    if known:
        raise ValueError(f"it holds {', '.join(sorted(known))}, which its config does not mention")
    if offsets_V is not None and len(offsets_V) < vocab_size:
        state["draft_ids"], order_V = ids_and_order(offsets_V)
        output = None if output is None else output[order_V]
    if output is None:
        state["gain"] = torch.ones_like(state["output_norm.weight"])
    else:
        state["lm_heads"] = output[None]
    return state


def layer_of(values: Mapping[str, Any], norms: Mapping[str, bool]) -> tuple[LayerConfig, PreTrainedConfig]:
    """The layer that a config of transformers describes, and that config with its defaults.

    Args:
        values: Values of the decoder's config.
        norms: Options of ``LayerConfig`` that such a config does not have.

    Raises:
        ValueError: This package cannot represent such a layer.
    """
    kind = values.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"its layer is of the kind {kind!r}, and only 'llama' and 'qwen3' can be loaded")
    config = AutoConfig.for_model(kind, **{key: value for key, value in values.items() if key != "model_type"})
    rope, kinds = config.rope_parameters or {}, set(values.get("layer_types") or ())
    for told, what in (
        (config.hidden_act != "silu", f"the activation {config.hidden_act!r}"),
        (getattr(config, "mlp_bias", False), "biases in its MLP"),
        (len(kinds) > 1, "a sliding window in some of its layers"),
        (values.get("target_hidden_size") not in (None, config.hidden_size), "a hidden size of its own"),
        (
            rope.get("rope_type") not in ROTARY or rope.get("partial_rotary_factor", 1.0) != 1.0,
            f"positions of another kind ({rope.get('rope_type')})",
        ),
    ):
        if told:
            raise ValueError(f"it has {what}, which heads here do not support")
    bias, window = bool(config.attention_bias), values.get("sliding_window") if "sliding_attention" in kinds else None
    own = {"attention_bias": bias, "norm_heads": kind == "qwen3", "window": window}
    return LayerConfig.of(config, **{**own, **norms}), config


def decoder_values(export: Export, layers: int = 1) -> dict[str, Any]:
    """A config of transformers for this number of such layers.

    It has as many positions as the base, because engines do not draft beyond ``max_position_embeddings``.
    """
    config, layer = export.heads.config, export.heads.config.layer
    assert layer is not None, "heads with a memory have one"
    context = export.base.context_length if export.base else 0
    sliding: dict[str, Any] = {} if layer.window is None else {
        "use_sliding_window": True, "sliding_window": layer.window, "layer_types": ["sliding_attention"] * layers,
    }  # fmt: skip
    return sliding | {
        "model_type": "qwen3" if layer.norm_heads else "llama",
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        **{name: getattr(layer, name) for name in SIZES},
        "max_position_embeddings": max(context, layer.max_position_embeddings),
        "rope_parameters": layer.rope_parameters,
    }
