"""What attention layers do not say in their calls, read from their configs.

transformers tells some layers what they may see by the mask alone, which it builds per kind of layer; masks over tree
rows are our own, so we need the rule itself.
"""

import torch
from torch import Tensor, nn


def visible_span(layer: nn.Module, window: int | None) -> tuple[int | None, int | None]:
    """Sliding window and chunk of a layer, in tokens, None where it has none.

    Args:
        layer: The attention layer.
        window: What its call names; some families (Qwen2-MoE, Phi-MoE) name nothing, and nothing names chunks.
    """
    config, index = getattr(layer, "config", None), getattr(layer, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index is not None else "sliding_attention"
    if window is None and kind == "sliding_attention":
        window = getattr(config, "sliding_window", None)
    return window, config.attention_chunk_size if kind == "chunked_attention" else None  # type: ignore[union-attr]


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
