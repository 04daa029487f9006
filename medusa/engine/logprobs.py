"""Log-probabilities of the tokens that a step emitted, for the rows that ask for them.

Legend: b rows that ask, A longest path, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.acceptance import Accepted
from medusa.engine.output import TokenLogprob


class LogprobReader:
    """Reads the base's distribution after every node of the accepted paths.

    Args:
        wanted: For each row how many of the most likely tokens to tell; None = nothing.
    """

    def __init__(self, wanted: Sequence[int | None]) -> None:
        self._rows = {row: top for row, top in enumerate(wanted) if top is not None}
        self._read: tuple[Tensor, Tensor, Tensor] | None = None

    def read(self, accepted: Accepted, logits_BNV: Tensor) -> None:
        """See what a step has accepted, by logits that nothing has processed."""
        rows_b = torch.tensor(list(self._rows), device=logits_BNV.device)
        path_bA = accepted.path[rows_b]
        after_bAV = logits_BNV[rows_b[:, None], path_bA].float().log_softmax(-1)
        chosen_bA = after_bAV.gather(2, accepted.tokens[rows_b][..., None])[..., 0]
        top = after_bAV.topk(max(1, *self._rows.values()) if self._rows else 1)
        self._read = chosen_bA, top.values, top.indices

    def take(self) -> dict[int, list[TokenLogprob]]:
        """Those of the last step by row, for every place of its path; behind the emitted tokens they mean nothing."""
        if self._read is None:
            return {}
        chosen, values, indices = (part.tolist() for part in self._read)
        self._read = None
        return {
            row: [
                TokenLogprob(logprob, dict(zip(indices[i][a][:most], values[i][a][:most], strict=True)))
                for a, logprob in enumerate(chosen[i])
            ]
            for i, (row, most) in enumerate(self._rows.items())
        }
