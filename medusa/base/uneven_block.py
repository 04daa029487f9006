"""How layers of a decoder may differ in a pass with our own kernels, recognised by their modules: Gemma 4.

Heads have other sizes, layers read keys and values of earlier ones, have a factor on their output, and read embeddings
of their own (per-layer embeddings). The rest is the usual block (``medusa.base.usual_block``).
"""

from typing import Any, NamedTuple

SCALE = "layer_scalar"
"""A factor [1] on the layer's output, which is no parameter."""
DECODER_INPUTS = {"embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"}
"""A decoder's parts that make per-layer embeddings."""
LAYER_INPUTS = ("per_layer_input_gate", "per_layer_projection")
INPUT_NORM = "post_per_layer_input_norm"
"""A layer's parts that read them: a gate of the hidden state, a projection of what it lets through, and its norm."""


class LayerInputs(NamedTuple):
    """What makes per-layer embeddings: share * (embeddings + norm(scale * projection of the token's embedding)).

    Attributes:
        embeddings: The numbers of tokens, layer by layer.
        projection: The linear layer from a token's embedding to as many numbers.
        norm: Of what is projected, layer by layer.
        size: Numbers of a layer.
        scale: Factor on what is projected.
        share: Factor on the sum.
    """

    embeddings: Any
    projection: Any
    norm: Any
    size: int
    scale: float
    share: float


def layer_inputs_of(decoder: Any) -> LayerInputs | None:
    """A decoder's per-layer embeddings; None = it has none."""
    if getattr(decoder, "embed_tokens_per_layer", None) is None:
        return None
    return LayerInputs(
        decoder.embed_tokens_per_layer, decoder.per_layer_model_projection, decoder.per_layer_projection_norm,
        decoder.hidden_size_per_layer_input, decoder.per_layer_model_projection_scale, decoder.per_layer_input_scale,
    )  # fmt: skip


def input_linears(layer: Any) -> list[Any]:
    """The gate of a layer's own embeddings, and the projection of what it lets through; none if it reads none."""
    return [getattr(layer, name) for name in LAYER_INPUTS if getattr(layer, name, None) is not None]


def head_sizes(attention: Any) -> tuple[int, int]:
    """A layer's number of key heads, and the size of its heads."""
    config, groups = attention.config, getattr(attention, "num_key_value_groups", None)
    return config.num_attention_heads // groups if groups else config.num_key_value_heads, attention.head_dim


def shares_keys(attention: Any) -> bool:
    """Whether a layer has only queries, and reads keys and values of an earlier layer."""
    return bool(getattr(attention, "is_kv_shared_layer", False))


def key_sources(decoder: Any) -> list[int] | None:
    """By layer, the one whose keys and values it reads: itself, or the last of its type that keeps them for others.

    None = there is none for some layer.
    """
    sources, kept = list(range(len(decoder.layers))), dict[str, int]()
    for index, layer in enumerate(decoder.layers):
        attention: Any = getattr(layer, "self_attn", None)
        if shares_keys(attention):
            if attention.layer_type not in kept:
                return None
            sources[index] = kept[attention.layer_type]
        elif getattr(attention, "store_full_length_kv", False):
            kept[attention.layer_type] = index
    return sources


def scale_of(layer: Any) -> float:
    """The factor on a layer's output."""
    return float(getattr(layer, SCALE, 1.0))
