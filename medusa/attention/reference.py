"""The reference backend: torch's own attention with an additive mask. Runs anywhere; the oracle of other backends."""

import torch
from torch import Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None, softcap: float | None = None
) -> Tensor:
    """Masked attention with grouped heads: the g query heads of one key head become g * N rows of it.

    Args:
        query: [B, H, N, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        bias: [B, 1, g * N, S], 0 or -inf.
        scaling: Factor on the scores; None = 1 / sqrt(D).
        softcap: Bound on the scores, where given.

    Returns:
        [B, H, N, Dv].
    """
    batch, heads, nodes, dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, dim)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scaling)
    else:
        scores = torch.matmul(rows, key.transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
        weights = torch.softmax((softcap * torch.tanh(scores / softcap) + bias).float(), dim=-1)
        out = torch.matmul(weights.to(value.dtype), value)
    return out.reshape(batch, heads, nodes, -1)
