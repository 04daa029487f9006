"""Log-probabilities of the tokens that a step emitted, and of prompts, for the requests that ask for them.

Legend: b rows that ask, A longest path, C tokens, F hidden states' width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.acceptance import Accepted
from medusa.base.model import BaseModel
from medusa.engine.output import TokenLogprob
from medusa.sampling import MAX_LOGPROBS

SCORED = 64
"""Rows of logits that are in memory at a time when a prompt is scored."""


def score(base: BaseModel, hidden_CF: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens, from the hidden state before each.

    Args:
        base: The base.
        hidden_CF: Hidden states, one for each token.
        tokens: The tokens that follow these states.
        top: Number of most likely tokens to report.
    """
    told = []
    for begin in range(0, len(tokens), SCORED):
        logprobs_CV = base.logits(hidden_CF[begin : begin + SCORED]).float().log_softmax(-1)
        tokens_C = torch.tensor(tokens[begin : begin + SCORED], device=logprobs_CV.device)
        chosen_C, (values, tokens_CK) = logprobs_CV.gather(1, tokens_C[:, None])[:, 0], _best(logprobs_CV)
        told += _told(chosen_C.tolist(), values.tolist(), tokens_CK.tolist(), top)
    return told


def _best(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens [.., K], always as many; of equally likely ones the lower id first, as in decoding."""
    ids = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1])).indices.sort(-1).values
    values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _told(
    chosen: Sequence[float], values: Sequence[Sequence[float]], indices: Sequence[Sequence[int]], top: int
) -> list[TokenLogprob]:
    return [
        TokenLogprob(logprob, dict(zip(tokens[:top], best[:top], strict=True)))
        for logprob, best, tokens in zip(chosen, values, indices, strict=True)
    ]


class LogprobReader:
    """Reads the base's distribution after every node of the accepted paths.

    Args:
        wanted: For each row the number of most likely tokens to report; None = no log-probabilities.
    """

    def __init__(self, wanted: Sequence[int | None]) -> None:
        self._rows = {row: top for row, top in enumerate(wanted) if top is not None}
        self._read: tuple[Tensor, Tensor, Tensor] | None = None

    def read(self, accepted: Accepted, logits_BNV: Tensor) -> None:
        """Read a step: what was accepted, and the base's own logits [B, N, V], before temperature and penalties."""
        rows_b = torch.tensor(list(self._rows), device=logits_BNV.device)
        path_bA = accepted.path[rows_b]
        after_bAV = logits_BNV[rows_b[:, None], path_bA].float().log_softmax(-1)
        chosen_bA = after_bAV.gather(2, accepted.tokens[rows_b][..., None])[..., 0]
        self._read = chosen_bA, *_best(after_bAV)

    def take(self) -> dict[int, list[TokenLogprob]]:
        """Log-probabilities of the last step by row, for its whole path; ignore those after the emitted tokens."""
        if self._read is None:
            return {}
        chosen, values, indices = (part.tolist() for part in self._read)
        self._read = None
        return {row: _told(chosen[i], values[i], indices[i], most) for i, (row, most) in enumerate(self._rows.items())}
