"""The reference backend: torch's attention with an additive mask. It runs anywhere; others are tested against it."""

import torch
from torch import Tensor

from medusa.attention.contract import Scoring, TreePlan
from medusa.attention.parts import Part, by_part, parts


class ReferenceAttention:
    """Gathers ``plan.kv_length`` positions of each sequence and masks them."""

    name = "reference"
    recordable = True
    dtypes = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

    def __init__(self, device: torch.device) -> None:
        pass

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """None: it can compute every layer."""
        return None

    def attend(self, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See ``TreeAttention``: attention with an additive mask, for one part of equally large trees at a time."""
        groups = query.shape[1] // key.shape[2]

        def attend(part: Part, query_SNHD: Tensor) -> Tensor:
            bias = _bias(plan, part, groups, query.dtype, scoring.window, scoring.chunk)
            keys, values = (part.gather(arena).transpose(1, 2) for arena in (key, value))
            return masked_attention(query_SNHD.transpose(1, 2), keys, values, bias, scoring).transpose(1, 2)

        return by_part(plan, query, attend)


def explicit_mask(plan: TreePlan, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask [1, 1, N, kv_length], 0 or -inf, of a pass over one tree, for families that need it with each call."""
    (part,) = parts(plan, device)
    assert len(part.lengths) == 1, "a mask belongs to one sequence"
    return _bias(plan, part, 1, dtype)


def _bias(
    plan: TreePlan,
    part: Part,
    groups: int,
    dtype: torch.dtype,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Additive mask [S, 1, groups * N, P]: 0 if a row sees a key, otherwise -inf; made once for all equal layers.

    Args:
        plan: The plan, which keeps the mask.
        part: The part with the rows.
        groups: Query heads per key head; the rows are repeated for each of them.
        dtype: The dtype of the queries.
        window: Sliding window in tokens, by position; None for full attention.
        chunk: Positions of a chunk; rows see only their own chunk; None for other layers.
    """

    def make() -> Tensor:
        visible_SNP = _visible(part, window, chunk)
        zero = torch.zeros((), dtype=dtype, device=visible_SNP.device)
        return torch.where(visible_SNP, zero, float("-inf")).repeat(1, groups, 1)[:, None]

    return plan.once((part, groups, dtype, window, chunk), make)


def _visible(part: Part, window: int | None, chunk: int | None) -> Tensor:
    """[S, Q, P] bool: whether a row sees a position."""
    sequences, nodes, at_SN = len(part.lengths), part.count, part.node_positions
    index_P = torch.arange(part.places.shape[1], device=at_SN.device)
    visible_SNP = (index_P < part.lengths[:, None, None]).expand(-1, nodes, -1).clone()
    visible_SNP.scatter_(2, at_SN[:, None].expand(-1, nodes, -1), part.ancestors)
    if window is None and chunk is None:
        return visible_SNP
    positions_SN = part.lengths[:, None] + part.depths
    key_positions_SP = index_P.expand(sequences, -1).clone().scatter_(1, at_SN, positions_SN)
    first_SN = positions_SN // chunk * chunk if chunk is not None else positions_SN - window + 1  # type: ignore[operator]
    return visible_SNP & (key_positions_SP[:, None] >= first_SN[:, :, None])


def masked_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scoring: Scoring) -> Tensor:
    """Attention with a mask and grouped heads: the g query heads of a key head become g * N rows.

    Args:
        query: [B, H, N, D] queries.
        key: [B, Hkv, S, D] keys.
        value: [B, Hkv, S, Dv] values.
        bias: [B, 1, g * N, S] additive mask, 0 or -inf; it includes windows.
        scoring: The scoring of the layer.

    Returns:
        Output [B, H, N, Dv].
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
