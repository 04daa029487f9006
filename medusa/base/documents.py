"""Keeps documents that are packed into one row apart, so that they do not see each other, in every family of models.

Most families pass position ids to transformers' masks, which then find the documents. Others do not, or have a layer
that depends on the index in the row. `medusa.loading.separation` tests what a base does, with rows that it will read.

Shapes: B rows, T tokens, N documents of a pass, L tokens of the longest of them, D hidden size, F width of
the base's hidden states.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate

Separation = Literal["positions", "masks", "rows"]
"""How documents are kept apart: by the base's own masks, by masks that are passed with each call, or one per row."""


def document_masks(config: PreTrainedConfig, positions_BT: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The ``attention_mask`` argument of a pass over packed rows; it includes windows and chunks.

    Returns:
        {"attention_mask": a mask [B, 1, T, T], or {kind of layer: mask} if layers differ}.
    """
    embeddings = torch.empty(*positions_BT.shape, 0, dtype=dtype, device=positions_BT.device)  # for its shape
    return {"attention_mask": create_masks_for_generate(config, embeddings, None, None, positions_BT)}


def document_lengths(positions: Tensor) -> Tensor:
    """Lengths of the documents in rows [..., T] of positions, in order: int64 [N]; every row begins a document."""
    begins = positions.diff(prepend=positions[..., :1] - 2) != 1
    starts = begins.flatten().nonzero().squeeze(1)
    return starts.diff(append=starts.new_tensor([positions.numel()]))


def document_rows(positions_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Give each document its own row, in few passes, longest first; a pass has at most as many tokens as the input.

    Returns:
        For each pass: indices [N, L] of its tokens among the B * T, where shorter documents are padded by repeating
        their last token, and bool [N, L], False at this padding.
    """
    lengths = document_lengths(positions_BT)
    starts = lengths.cumsum(0) - lengths
    order = lengths.argsort(descending=True, stable=True)
    passes = []
    while len(order):
        longest = int(lengths[order[0]])
        here, order = order.split([count := min(len(order), positions_BT.numel() // longest), len(order) - count])
        ramp_L = torch.arange(longest, device=starts.device)
        ends_N1 = lengths[here, None]
        passes.append((starts[here, None] + ramp_L.minimum(ends_N1 - 1), ramp_L < ends_N1))
    return passes


def separate_pass(run: Callable[..., Tensor], ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
    """Hidden states [B, T, F] of packed rows, computed with each document in its own row; gradients pass through.

    Args:
        run: A pass of the base: (input_ids=, use_cache=) -> hidden states.
        ids_BT: int64 token ids.
        positions_BT: int64 positions within the documents.
    """
    places, states = [], []
    for places_NL, real_NL in document_rows(positions_BT):
        hidden_NLF = run(input_ids=ids_BT.flatten()[places_NL], use_cache=False)
        places.append(places_NL[real_NL])
        states.append(hidden_NLF[real_NL.to(hidden_NLF.device)])
    order = torch.cat(places).argsort().to(states[0].device)
    return torch.cat(states)[order].view(*ids_BT.shape, -1)
