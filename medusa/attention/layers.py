"""Corrections for attention layers that derive positions from the cache, which is wrong for rows of trees."""

import torch
from torch import Tensor, nn

from medusa.attention.contract import TreePlan


def rescale_queries(layer: nn.Module, query_RHD: Tensor, plan: TreePlan) -> Tensor:
    """Scale queries by their rows' positions, if a layer has scaled them by their indices in the pass.

    Llama 4 does so in layers without rotary positions.

    Args:
        layer: The attention layer; queries of all other layers are returned unchanged.
        query_RHD: [R, H, D] queries.
        plan: The plan with the rows' positions.
    """
    if not getattr(layer, "attn_temperature_tuning", False) or layer.use_rope:
        return query_RHD

    def scale(positions_R: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions_R.float() + 1) / layer.floor_scale)) * layer.attn_scale + 1  # type: ignore[operator]

    taken_R = torch.arange(plan.rows, device=plan.positions.device)
    ratio_R = (scale(plan.positions) / scale(taken_R)).to(query_RHD.device)
    return (query_RHD * ratio_R[:, None, None]).to(query_RHD.dtype)
