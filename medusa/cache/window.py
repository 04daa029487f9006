"""A window on the text for layers that draft: they see its first positions and its last ones.

Layers that were trained on short texts can guess worse behind long ones, and their attention takes longer. The first
positions stay visible because much attention rests there, whatever they hold (StreamingLLM, Xiao et al. 2024). A window
begins with a block of the cache, so attention reads a shorter table and knows nothing of it. Keys are stored rotated by
their positions in the text, and rows keep theirs too.

Legend: S texts, L positions, W blocks of a text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.attention.contract import BlockTable, TreePlan
from medusa.cache.index import BLOCK

SINK = BLOCK
"""Number of first positions that stay visible."""


def window_start(lengths: Tensor, window: int) -> Tensor:
    """The first positions of the windows of texts of these lengths: the last ``window`` positions, in whole blocks."""
    return (lengths - window).clamp(min=0) // BLOCK * BLOCK


def unseen(places: Tensor, length: int, window: int | None) -> Tensor:
    """Bool [..., length]: the positions that rows at these places [...] do not see.

    Args:
        places: int64, positions of the rows, the last ones of the texts that they see.
        length: Number of positions.
        window: The least number of last positions that a row sees; None = all up to its own.
    """
    index_L = torch.arange(length, device=places.device)
    unseen = index_L > places[..., None]
    if window is None:
        return unseen
    return unseen | (index_L >= SINK) & (index_L < window_start(places + 1, window)[..., None])


def windowed(plan: TreePlan, window: int, committed: Tensor | Sequence[int] | int = 0) -> TreePlan:
    """The plan with a table that leaves out the blocks between the first positions and the window of each text.

    Only the last row of a text sees its own window: rows before it see less, and their outputs are not used. The rows
    of a pass see each other, so the last of more than ``window`` rows sees more.

    Args:
        plan: The plan of a pass over the whole texts; returned as it is if none of them is longer.
        window: The least number of last positions that a row sees.
        committed: Number of first nodes that belong to the text, the same for all trees or of each (a tensor: int64).
    """
    if plan.kv_length <= SINK + window:
        return plan
    if isinstance(committed, Sequence):
        committed = torch.tensor(committed, device=plan.lengths.device)
    texts_S = torch.minimum(plan.lengths + committed, plan.lengths + window)
    skipped_S = (window_start(texts_S, window) - SINK).clamp(min=0)
    kv_length = min(plan.kv_length, SINK + window + BLOCK + max(plan.sizes))
    index_W = torch.arange(-(-kv_length // BLOCK), device=skipped_S.device)
    index_SW = index_W + torch.where(index_W * BLOCK < SINK, 0, skipped_S[:, None] // BLOCK)
    blocks_SW = plan.table.blocks.gather(1, index_SW.clamp(max=plan.table.blocks.shape[1] - 1))
    table, lengths_S = BlockTable(blocks_SW, BLOCK), plan.lengths - skipped_S
    shorter = TreePlan(plan.drafts, lengths_S, kv_length, table, plan.backend, plan.spans, plan.computed)
    shorter.skipped, shorter.reach = skipped_S, plan.reach
    return shorter
