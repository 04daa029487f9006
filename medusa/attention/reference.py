"""The reference backend: torch's own attention with an additive mask. Runs anywhere; the oracle of other backends."""

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Masked attention with grouped heads: the g query heads of one key head become g * N rows of it.

    Args:
        query: [B, H, N, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        bias: [B, 1, g * N, S], 0 or -inf.
        scaling: Factor on the scores; None = 1 / sqrt(D).
        softcap: Bound on the scores, where given.
        sinks: [H] score of a key that every row sees and that has no value, where given.

    Returns:
        [B, H, N, Dv].
    """
    batch, heads, nodes, dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, dim)
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scaling)
    else:
        scores = torch.matmul(rows, key.transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = (scores + bias).float()
        if sinks is not None:
            column = sinks.float().view(key.shape[1], -1, 1).expand(-1, -1, nodes).reshape(1, key.shape[1], -1, 1)
            scores = torch.cat([scores, column.expand(batch, -1, -1, -1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        out = torch.matmul(weights.to(value.dtype), value)
    return out.reshape(batch, heads, nodes, -1)
