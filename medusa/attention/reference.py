"""The reference backend: torch's own attention with an additive mask. Runs anywhere; the measure of other backends."""

import torch
from torch import Tensor

from medusa.attention.contract import Scoring, TreePlan


class ReferenceAttention:
    """Masks all S rows. Rows that nobody may see must still hold finite numbers, as those of ``SlotCache`` do."""

    name = "reference"
    recordable = True
    dtypes = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

    def __init__(self, device: torch.device) -> None:
        pass

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """None: it computes every layer."""
        return None

    def attend(self, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See ``TreeAttention.attend``."""
        groups = query.shape[1] // key.shape[1]
        bias = plan.bias(groups, query.dtype, query.device, scoring.window, scoring.chunk)
        return masked_attention(query, key, value, bias, scoring)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scoring: Scoring) -> Tensor:
    """Attention under a mask, with grouped heads: the g query heads of one key head become g * N rows of it.

    Args:
        query: [B, H, N, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        bias: [B, 1, g * N, S], 0 or -inf; windows are part of it.
        scoring: The layer's numbers.

    Returns:
        [B, H, N, Dv].
    """
    batch, heads, nodes, dim = query.shape
    rows, sinks, softcap = query.reshape(batch, key.shape[1], -1, dim), scoring.sinks, scoring.softcap
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scoring.scaling)
    else:
        scores = torch.matmul(rows, key.transpose(2, 3)) * scoring.scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = (scores + bias).float()
        if sinks is not None:
            column = sinks.float().view(key.shape[1], -1, 1).expand(-1, -1, nodes).reshape(1, key.shape[1], -1, 1)
            scores = torch.cat([scores, column.expand(batch, -1, -1, -1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        out = torch.matmul(weights.to(value.dtype), value)
    return out.reshape(batch, heads, nodes, -1)


def explicit_mask(plan: TreePlan, dtype: torch.dtype, device: torch.device) -> Tensor:
    raise NotImplementedError
