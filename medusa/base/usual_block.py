"""The transformer block that many families share (Llama's), recognised by its modules, for passes with own kernels.

A test at load checks that the results are equal (``medusa.loading.self_test``).
"""

from typing import Any

import torch
from torch import Tensor, nn

from medusa.base.rotary import Rotary

BLOCK_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles depend only on the position."""


class UnusualBlockError(ValueError):
    """A decoder does not consist of the usual block, so transformers runs it."""


def check_decoder(decoder: Any) -> None:
    """Check that a decoder and its layers have no other parts.

    Raises:
        UnusualBlockError: They have.
    """
    _know(decoder, DECODER_PARTS, "the decoder")
    for layer in decoder.layers:
        _know(layer, BLOCK_PARTS, "a layer")
        _know(layer.self_attn, ATTENTION_PARTS, "its attention")
        _know(layer.mlp, MLP_PARTS, "its MLP")
        activation = getattr(layer.mlp, "act_fn", None) or getattr(layer.mlp, "activation_fn", None)
        if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
            raise UnusualBlockError(f"its MLP's activation is {type(activation).__name__}")
        if getattr(layer.self_attn, "sinks", None) is not None or not getattr(layer.self_attn, "use_rope", True):
            raise UnusualBlockError("its attention has sinks, or no positions in some layers")


def shape_of(decoder: Any) -> dict[str, Any]:
    """The sizes and factors that all layers share.

    Raises:
        UnusualBlockError: Its positions, norms or heads are of another kind.
    """
    layer, norm, config = decoder.layers[0], decoder.norm, decoder.config
    dim, rotary = getattr(layer.self_attn, "head_dim", 0), decoder.rotary_emb
    if getattr(rotary, "rope_type", None) not in ROTARY:
        raise UnusualBlockError(f"its positions are {getattr(rotary, 'rope_type', 'of another kind')}")
    epsilon = getattr(norm, "variance_epsilon", None)
    if not dim or epsilon is None or _norm(norm, epsilon) is None:
        raise UnusualBlockError("its norms or heads are of another kind")
    return {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "dim": dim,
        "epsilon": epsilon,
        "scaling": layer.self_attn.scaling,
        "residual": float(getattr(layer, "residual_multiplier", 1.0)),
        "multiplier": float(getattr(decoder, "embedding_multiplier", 1.0)),
    }


def norms_of(layer: Any, dim: int, epsilon: float) -> list[Tensor | None]:
    """Weights of a layer's norms: before attention and before the MLP, and of queries and keys head by head (or None).

    Raises:
        UnusualBlockError: A norm is of another kind.
    """
    attention = layer.self_attn
    own = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    norms = [_norm(norm, epsilon) for norm in (layer.input_layernorm, layer.post_attention_layernorm, *own)]
    if any(norm is not None and norm.numel() != dim for norm in norms[2:]):
        raise UnusualBlockError("it norms queries and keys over all heads")
    return norms


def rotary_of(decoder: Any) -> Rotary:
    """The decoder's rotary positions."""

    def angles(rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = decoder.rotary_emb(like, torch.arange(rows, device=like.device)[None])
        return cosines[0].contiguous(), sines[0].contiguous()

    return Rotary(angles)


def _know(module: nn.Module, parts: set[str], what: str) -> None:
    """Raise an error if a module has parts or parameters that are not known."""
    own = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    strange = (own | {name for name, _ in module.named_parameters(recurse=False)}) - parts
    if strange:
        raise UnusualBlockError(f"{what} ({type(module).__name__}) has {', '.join(sorted(strange))}")


def _norm(norm: Any, epsilon: float) -> Tensor | None:
    if norm is None:
        return None
    if not type(norm).__name__.endswith("RMSNorm") or getattr(norm, "variance_epsilon", None) != epsilon:
        raise UnusualBlockError(f"a norm is {type(norm).__name__}")
    weight: Tensor = norm.weight
    return weight
