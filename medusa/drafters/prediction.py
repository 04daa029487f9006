"""Drafting from a predicted text: most of an edited file equals the old file."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.drafters.merge import node_floor
from medusa.drafters.prompt_lookup import MAX_MATCH, PromptLookupDrafter
from medusa.state import DecodeState
from medusa.tree import Draft

NODES = 16
"""Most nodes of a draft; where the prediction holds, all are right."""


class PredictionDrafter(Drafter):
    """Prompt lookup in a predicted text, as if it preceded the prompt.

    Args:
        predicted: Token ids of the prediction.
        cheap_rows: Number of rows of a pass that cost little more than one (``BaseModel.cheap_rows``). On a CPU guesses
            that are less likely than one in so many are left out.
    """

    nodes = NODES

    def __init__(self, predicted: Sequence[int], cheap_rows: int = NODES) -> None:
        self._predicted = torch.tensor([list(predicted)])
        self._lookup = PromptLookupDrafter(NODES, floor=node_floor(cheap_rows))
        self._texts: tuple[Tensor, Tensor] | None = None

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A tree below ``state.roots``."""
        texts = self._behind(state)
        before = texts.shape[1] - state.history.shape[1]
        return self._lookup.propose(replace(state, history=texts, positions=state.positions + before), cached)

    def _behind(self, state: DecodeState) -> Tensor:
        """The histories after the prediction, which follows the prompt's end, so that its beginning is found too.

        The buffer is the same while the state's is, because lookup remembers what it has read of it.
        """
        if self._texts is None or self._texts[0] is not state.history:
            start = int(state.starts[0])
            rows = state.history.shape[0]
            ends_B = state.history[:, max(0, start - MAX_MATCH) : start]
            predicted = self._predicted.to(state.history.device).expand(rows, -1)
            self._texts = state.history, torch.cat([ends_B, predicted, state.history], 1)
        history, texts = self._texts
        texts[:, -history.shape[1] :] = history
        return texts
