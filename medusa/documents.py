"""Documents packed into one row do not see each other, whatever a family of models makes of position ids.

Most families hand position ids to transformers' masks, which then find the documents. Others do not, or let a layer see
the place in the row. What a base does is measured (`choose_separation`), with the rows that it will read.

Shapes: B rows, T tokens, N documents of a pass, L tokens of the longest of them, D hidden size, F width of
the base's hidden states.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate

if TYPE_CHECKING:
    from medusa.base_model import BaseModel

logger = logging.getLogger(__name__)

Separation = Literal["positions", "masks", "rows"]
SEPARATIONS: dict[Separation, str] = {
    "positions": "its own masks",
    "masks": "masks that travel with each pass",
    "rows": "a row for each document, which takes longer",
}
"""How documents are kept apart, the cheapest way first, in words."""
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Largest mean of |difference| / |hidden state| over a document; coarser dtypes get ``COARSE``."""
COARSE = 0.05
"""For half precision. Measured at 5 and 30 layers: 0.01 where nothing leaks, 0.5 to 0.9 where everything does."""
EDGES = (2, 5, 7)
"""Where the documents of the measured row end, in sevenths: not where windows or chunks do."""
REFUSALS = (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError)
"""Errors of a family that takes no such masks."""


def document_masks(config: PreTrainedConfig, positions_BT: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The ``attention_mask`` argument of a pass over packed rows, windows and chunks included.

    Returns:
        {"attention_mask": a mask [B, 1, T, T], or {kind of layer: mask} where layers differ}.
    """
    embeddings = torch.empty(*positions_BT.shape, 0, dtype=dtype, device=positions_BT.device)  # read for their shape
    return {"attention_mask": create_masks_for_generate(config, embeddings, None, None, positions_BT)}


def document_rows(positions_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A row for each document, as few passes as have no more tokens each than the packed rows, longest first.

    Returns:
        For each pass the places [N, L] of its tokens among the B * T, a document's last one again behind its end, and
        where they are no such repetition, bool [N, L].
    """
    begins_BT = positions_BT.diff(prepend=positions_BT[:, :1] - 2) != 1  # every row begins a document
    starts = begins_BT.flatten().nonzero().squeeze(1)
    lengths = starts.diff(append=starts.new_tensor([positions_BT.numel()]))
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
    """Hidden states [B, T, F] of packed rows, each document in a row of its own; gradients pass through.

    Args:
        run: A pass of the base: (input_ids=, use_cache=) -> hidden states.
        ids_BT: int64.
        positions_BT: int64.
    """
    places, states = [], []
    for places_NL, real_NL in document_rows(positions_BT):
        hidden_NLF = run(input_ids=ids_BT.flatten()[places_NL], use_cache=False)
        places.append(places_NL[real_NL])
        states.append(hidden_NLF[real_NL.to(hidden_NLF.device)])
    order = torch.cat(places).argsort().to(states[0].device)
    return torch.cat(states)[order].view(*ids_BT.shape, -1)


def choose_separation(base: "BaseModel", ids_T: Tensor, agreed: Callable[[bool], bool] = bool) -> None:
    """Set ``base.separation`` to the first way in which packed documents are what they are alone.

    Args:
        base: The base; its tapped copies follow.
        ids_T: int64; a row as long as those that will be packed, since windows and chunks matter in long ones only.
        agreed: (does it leak here) -> does it leak in any process of the run.

    Raises:
        ValueError: There is no such way.
    """
    reasons: list[str] = []
    for separation, words in SEPARATIONS.items():
        base.separation = separation
        reason = _objection(base, ids_T)
        if not agreed(reason is not None):
            if reasons:
                kind = base.config.model_type
                logger.warning("base (%s, %s) needs %s: %s", base.name, kind, words, reasons[0])
            return
        reasons.append(reason or "it leaks in another process")
    base.separation = "positions"
    raise ValueError(
        f"base ({base.name}, {base.config.model_type}) cannot be trained on: {reasons[-1]} even where each has a "
        "row of its own; use a base with causal attention"
    )


@torch.no_grad()
def _objection(base: "BaseModel", ids_T: Tensor) -> str | None:
    """Why packed documents are not what they are alone, None if they are."""
    ids_T = ids_T.to(base.device)
    documents = ids_T.tensor_split([edge * len(ids_T) // EDGES[-1] for edge in EDGES[:-1]])
    positions_1T = torch.cat([torch.arange(len(document), device=base.device) for document in documents])[None]
    alone_TD = torch.cat([base.hidden_states(document[None])[0] for document in documents])[
        :, : base.hidden_size
    ].float()
    refusals = REFUSALS if base.separation == "masks" else ()  # what fails without them would fail in training too
    try:
        packed_TD = base.hidden_states(ids_T[None], positions_1T)[0, :, : base.hidden_size].float()
    except refusals as error:
        return f"its forward pass refuses masks: {(str(error).splitlines() or [type(error).__name__])[0]}"
    error_T = (packed_TD - alone_TD).norm(dim=-1) / alone_TD.norm(dim=-1)
    worst = max(part.mean().item() for part in error_T.split([len(document) for document in documents]))
    limit = TOLERANCE.get(base.dtype, COARSE)
    return None if worst <= limit else f"hidden states of packed documents differ by {worst:.2g} (limit {limit})"
