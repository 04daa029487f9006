"""Backends are tried out with the layers of the base before one is chosen, up to the rows of a prefill."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from medusa.attention.contract import BlockTable, Scoring, TreeAttention, TreePlan
from medusa.tree import Draft

TRIED_CONTEXT, TRIED_NODES, TRIED_BLOCK = 128, (1, 16, 64, 512), 32
"""Cached positions of a trial, its tree sizes (blocks of rows of every size, up to those of a prefill), and positions
of a block of the pool."""


class LayerShape(NamedTuple):
    """What a kernel for a layer depends on, for a trial.

    Attributes:
        groups: Query heads per key head.
        dim: D.
        dim_v: Dv.
        scoring: The layer's numbers.
    """

    groups: int = 1
    dim: int = 64
    dim_v: int = 64
    scoring: Scoring = Scoring(1.0)


def head_size(layer: nn.Module) -> int | None:
    """D of an attention layer of transformers; None = it is another module."""
    # DeepSeek's latent attention, GPT-NeoX, and all others.
    sizes = (getattr(layer, name, None) for name in ("qk_head_dim", "head_size", "head_dim"))
    dim = next((size for size in sizes if size), None)
    return dim if isinstance(dim, int) and isinstance(getattr(layer, "layer_idx", None), int) else None


def layer_shapes(model: nn.Module, config: Any) -> tuple[LayerShape, ...]:
    """The different shapes of a model's attention layers, with the scoring that its config names.

    A layer with a sliding window has two: a window that spans the whole text is none.

    Args:
        model: A transformers model; what its layers are asked for is what all families call alike.
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
    """Why a backend that could be built does not work here (no compiler, too old a GPU), None if it does.

    Args:
        backend: What is tried.
        device: Where.
        dtype: Of queries, keys and values.
        layers: Each is tried, but those that the backend objects to, unless it objects to all; none = an ordinary one.
    """
    layers = layers or (LayerShape(),)
    if dtype not in backend.dtypes:
        return f"does not compute in {dtype}"
    objections = []
    for layer in layers:
        for nodes in TRIED_NODES:
            try:
                objection, right = _try_layer(backend, device, dtype, layer, nodes)
            except Exception as error:  # noqa: BLE001  # every kernel's compiler and loader fails in its own way
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
    """The backend's objection, or whether its numbers are right."""
    tokens, kv_heads = torch.zeros(1, nodes, dtype=torch.int64, device=device), 2
    lengths = tokens[:, 0] + TRIED_CONTEXT
    kv_length = TRIED_CONTEXT + nodes
    blocks = torch.arange(-(-kv_length // TRIED_BLOCK), device=device).flip(0)
    plan = TreePlan([Draft.chain(tokens)], lengths, kv_length, BlockTable(blocks[None], TRIED_BLOCK), backend)
    # All rows are alike: whatever their weights, the result is their value.
    numbers = torch.arange(max(layer.dim, layer.dim_v), device=device, dtype=dtype) / 256
    query = numbers[: layer.dim].repeat(nodes, kv_heads * layer.groups, 1)
    key = numbers[: layer.dim].repeat(len(blocks), TRIED_BLOCK, kv_heads, 1)
    value = numbers[: layer.dim_v].repeat(len(blocks), TRIED_BLOCK, kv_heads, 1)
    objection = backend.objection(query, key, value, layer.scoring)
    if objection is not None:
        return objection, True
    out = backend.attend(plan, query, key, value, layer.scoring)
    return None, torch.allclose(out, numbers[: layer.dim_v], atol=0.01)
