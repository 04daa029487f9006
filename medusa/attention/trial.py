"""Tests a backend with the layers of the base before it is chosen, with up to as many rows as a prefill has."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from medusa.attention.contract import BlockTable, Scoring, TreeAttention, TreePlan
from medusa.tree import Draft

TRIED_CONTEXT, TRIED_NODES, TRIED_BLOCK = 128, (1, 16, 64, 512), 32
"""Cached positions of a test, its tree sizes (for blocks of rows of every size, up to a prefill's), and positions of a
block of the pool."""


class LayerShape(NamedTuple):
    """The properties of a layer on which a kernel depends, for a test.

    Attributes:
        groups: Query heads per key head.
        dim: Head size D of queries and keys.
        dim_v: Head size Dv of values.
        scoring: The scoring of the layer.
    """

    groups: int = 1
    dim: int = 64
    dim_v: int = 64
    scoring: Scoring = Scoring(1.0)


def head_size(layer: nn.Module) -> int | None:
    """Head size D of an attention layer of transformers; None = another kind of module."""
    if hasattr(layer, "conv_kernel_size"):  # a recurrent layer, whose heads have other names or the same ones
        return None
    # DeepSeek's latent attention, GPT-NeoX, and all others.
    sizes = (getattr(layer, name, None) for name in ("qk_head_dim", "head_size", "head_dim"))
    dim = next((size for size in sizes if size), None)
    return dim if isinstance(dim, int) and isinstance(getattr(layer, "layer_idx", None), int) else None


def layer_shapes(model: nn.Module, config: Any) -> tuple[LayerShape, ...]:
    """The different shapes of a model's attention layers, with the scoring from its config.

    A layer with a sliding window has two shapes: a window that covers the whole text has no effect.

    Args:
        model: A transformers model; only attributes that all families share are read.
        config: Its text config.
    """
    windows = dict.fromkeys((None, getattr(config, "sliding_window", None)))
    softcap = getattr(config, "attn_logit_softcapping", None)
    shapes: dict[LayerShape, None] = {}
    for layer in model.modules():
        dim = head_size(layer)
        if dim is None:
            continue
        dim_v, groups = getattr(layer, "v_head_dim", None) or dim, getattr(layer, "num_key_value_groups", None) or 1
        for window in windows:
            shapes[LayerShape(groups, dim, dim_v, Scoring(dim**-0.5, window, softcap))] = None
    return tuple(shapes) or (LayerShape(),)


def try_out(
    backend: TreeAttention,
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerShape] = (),
) -> str | None:
    """Why a backend that was built does not work here (no compiler, an old GPU); None if it works.

    Args:
        backend: The backend to test.
        device: The device.
        dtype: Dtype of queries, keys and values.
        layers: Layers to test; those that the backend cannot compute are skipped, unless these are all.
            Empty = one ordinary layer.
    """
    layers = layers or (LayerShape(),)
    if dtype not in backend.dtypes:
        return f"does not compute in {dtype}"
    objections = []
    for layer in layers:
        for nodes in TRIED_NODES:
            try:
                objection, right = _try_layer(backend, device, dtype, layer, nodes)
            except Exception as error:  # noqa: BLE001  # compilers and loaders of kernels raise many kinds of errors
                return f"fails: {error}"
            if not right:
                return "computes wrong numbers"
            if objection is not None:
                objections.append(objection)
                break
    return f"rejects all layers: {objections[0]}" if len(objections) == len(layers) else None


def _try_layer(
    backend: TreeAttention, device: torch.device, dtype: torch.dtype, layer: LayerShape, nodes: int
) -> tuple[str | None, bool]:
    """The backend's objection, and whether its results are right."""
    tokens, kv_heads = torch.zeros(1, nodes, dtype=torch.int64, device=device), 2
    lengths = tokens[:, 0] + TRIED_CONTEXT
    kv_length = TRIED_CONTEXT + nodes
    blocks = torch.arange(-(-kv_length // TRIED_BLOCK), device=device).flip(0)
    plan = TreePlan([Draft.chain(tokens)], lengths, kv_length, BlockTable(blocks[None], TRIED_BLOCK), backend)
    # All values are equal, so the result is this value for any weights.
    numbers = torch.arange(max(layer.dim, layer.dim_v), device=device, dtype=dtype) / 256
    query = numbers[: layer.dim].repeat(nodes, kv_heads * layer.groups, 1)
    key = numbers[: layer.dim].repeat(len(blocks), TRIED_BLOCK, kv_heads, 1)
    value = numbers[: layer.dim_v].repeat(len(blocks), TRIED_BLOCK, kv_heads, 1)
    objection = backend.objection(query, key, value, layer.scoring)
    if objection is not None:
        return objection, True
    out = backend.attend(plan, query, key, value, layer.scoring)
    return None, torch.allclose(out, numbers[: layer.dim_v], atol=0.01)
