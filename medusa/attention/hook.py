"""The attention function that transformers calls.

The base stays an unmodified transformers model: the function is registered once under ``IMPLEMENTATION``, and the plan
of a pass is a keyword argument of the forward call, which is one call [1, R] over the rows of all trees.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa.attention.backends import attend
from medusa.attention.contract import Scoring, TreePlan
from medusa.attention.layers import rescale_queries
from medusa.attention.reference import masked_attention

IMPLEMENTATION = "medusa_tree"


def tree_attention(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_plan: TreePlan | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in transformers' calling convention.

    Without a plan (training, a plain forward pass) this is plain attention with transformers' own mask.

    Args:
        module: The attention layer.
        query: [B, H, T, D]; with a plan [1, H, R, D].
        key: [B, Hkv, S, D]; with a plan all keys of the layer in the pool [blocks, size, Hkv, D], from its cache layer,
            or a copy [1, Hkv, blocks * size, D].
        value: The values, in the same layout, with Dv.
        attention_mask: Used only without a plan.
        tree_plan: The plan of the pass.
        scaling: Factor on the scores; None = 1 / sqrt(D).
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None = they do not change.
        s_aux: [H] attention sinks, if the layer has them.

    Returns:
        Output [B, T, H, Dv] and None for the weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree_plan is not None:
        assert module is not None, "transformers passes its layer"
        query_RHD = rescale_queries(module, query[0].transpose(0, 1), tree_plan)
        window, chunk = tree_plan.span(getattr(module, "layer_idx", None))
        scoring = Scoring(scale, window, softcap, s_aux, chunk)
        if tree_plan.gathered:
            size = tree_plan.table.size
            key, value = (x[0].transpose(0, 1).unflatten(0, (-1, size)).contiguous() for x in (key, value))
        # transformers' own functions return it in one piece, and AFMoE views it.
        return attend_rows(tree_plan, query_RHD, key, value, scoring).contiguous()[None], None
    if softcap is None and s_aux is None:
        plain: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]
        return plain, None
    bias = _additive(attention_mask, query, key).repeat(1, 1, query.shape[1] // key.shape[1], 1)
    scoring = Scoring(scale, softcap=softcap, sinks=s_aux)
    return masked_attention(query, key, value, bias, scoring).transpose(1, 2), None


def attend_rows(plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """``attend`` without windows and chunks that have no effect.

    A window or chunk that covers all positions hides none, so kernels that support neither can compute the layer.
    """
    if scoring.window is not None and scoring.window >= plan.kv_length:
        scoring = scoring._replace(window=None)
    if scoring.chunk is not None and scoring.chunk >= plan.kv_length:
        scoring = scoring._replace(chunk=None)
    query = query if query.stride(-1) == 1 else query.contiguous()
    return attend(plan, query, key, value, scoring)


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """transformers' mask [B, 1, T, S], or the causal mask if there is none, as 0 and -inf."""
    if mask is None:
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=query.device), float("-inf"))


def register() -> None:
    """Register ``IMPLEMENTATION`` with transformers; further calls change nothing."""
    AttentionInterface.register(IMPLEMENTATION, tree_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
