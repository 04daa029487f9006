"""Tests before training how packed documents must be kept apart for a base, with a row of the training length."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from medusa.base.documents import Separation
from medusa.base.model import BaseModel

logger = logging.getLogger(__name__)

SEPARATIONS: dict[Separation, str] = {
    "positions": "its own masks",
    "masks": "masks that are passed with each call",
    "rows": "a row for each document, which takes longer",
}
"""Descriptions of the ways to keep documents apart; the cheapest comes first."""
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Largest mean of |difference| / |hidden state| over a document; ``COARSE`` for coarser dtypes."""
COARSE = 0.05
"""For half precision. Measured at 5 and 30 layers: 0.01 if nothing leaks, 0.5 to 0.9 if everything leaks."""
EDGES = (2, 5, 7)
"""Ends of the documents in the test row, in sevenths, so that they differ from ends of windows and chunks."""
REFUSALS = (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError)
"""Errors of a family that does not accept such masks."""


def choose_separation(base: BaseModel, ids_T: Tensor, agreed: Callable[[bool], bool] = bool) -> BaseModel:
    """Find the first way in which packed documents give the same results as alone; sets ``Traits.separation``.

    Args:
        base: The base as training will use it.
        ids_T: int64 tokens, as many as in a packed row, because windows and chunks have effects only in long rows.
        agreed: (whether it leaks in this process) -> whether it leaks in any process of the run.

    Raises:
        ValueError: There is no such way.
    """
    reasons: list[str] = []
    for separation, words in SEPARATIONS.items():
        tried = base.with_traits(separation=separation)
        reason = _objection(tried, ids_T)
        if not agreed(reason is not None):
            if reasons:
                kind = base.config.model_type
                logger.warning("base (%s, %s) needs %s: %s", base.name, kind, words, reasons[0])
            return tried
        reasons.append(reason or "documents leak into each other in another process")
    raise ValueError(
        f"base ({base.name}, {base.config.model_type}) cannot be trained on: {reasons[-1]} even where each has a "
        "row of its own; use a base with causal attention"
    )


@torch.no_grad()
def _objection(base: BaseModel, ids_T: Tensor) -> str | None:
    """Why packed documents differ from documents alone; None if they are equal."""
    ids_T = ids_T.to(base.device)
    documents = ids_T.tensor_split([edge * len(ids_T) // EDGES[-1] for edge in EDGES[:-1]])
    positions_1T = torch.cat([torch.arange(len(document), device=base.device) for document in documents])[None]
    alone_TD = torch.cat([base.hidden_states(document[None])[0] for document in documents])[
        :, : base.hidden_size
    ].float()
    refusals = REFUSALS if base.traits.separation == "masks" else ()  # other errors would also occur in training
    try:
        packed_TD = base.hidden_states(ids_T[None], positions_1T)[0, :, : base.hidden_size].float()
    except refusals as error:
        return f"its forward pass refuses masks: {(str(error).splitlines() or [type(error).__name__])[0]}"
    size_T = alone_TD.norm(dim=-1)
    size_T = size_T.where(size_T > 0, size_T.mean())  # the embedding of a padding token may be zero
    error_T = (packed_TD - alone_TD).norm(dim=-1) / size_T.clamp(min=torch.finfo(size_T.dtype).tiny)
    means = torch.stack([part.mean() for part in error_T.split([len(document) for document in documents])])
    worst = means.max().item()  # nan where any is
    limit = TOLERANCE.get(base.dtype, COARSE)
    return None if worst <= limit else f"hidden states of packed documents differ by {worst:.2g} (limit {limit})"
