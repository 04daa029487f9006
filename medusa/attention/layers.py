"""What attention layers take from the cache that is not so over tree rows."""

import torch
from torch import Tensor, nn


def rescale_queries(layer: nn.Module, query_BHND: Tensor, positions_BN: Tensor, first_row: int) -> Tensor:
    """Queries scaled by their rows' positions, where a layer has scaled them by their indices in the cache.

    Llama 4 does so in layers without rotary positions; tree rows stand at other indices than their positions.

    Args:
        layer: The attention layer; all but those layers get their queries back.
        query_BHND: [B, H, N, D].
        positions_BN: [B, N] int64.
        first_row: Index that the layer has taken for the first of the N rows.
    """
    if not getattr(layer, "attn_temperature_tuning", False) or layer.use_rope:
        return query_BHND

    def scale(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1) / layer.floor_scale)) * layer.attn_scale + 1  # type: ignore[operator]

    rows_N = first_row + torch.arange(positions_BN.shape[1], device=positions_BN.device)
    ratio_BN = (scale(positions_BN) / scale(rows_N)).to(query_BHND.device)
    return (query_BHND * ratio_BN[:, None, :, None]).to(query_BHND.dtype)
