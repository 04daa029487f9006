"""Drafting from a text that somebody expects: most of an edited file is the file before."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.drafters.prompt_lookup import MAX_MATCH, PromptLookupDrafter
from medusa.state import DecodeState
from medusa.tree import Draft

NODES = 16
"""Of a draft; where the prediction holds they are all right."""


class PredictionDrafter(Drafter):
    """Prompt lookup in a text as if it stood before the prompt.

    Args:
        predicted: Token ids.
        nodes: N, the root included.
    """

    def __init__(self, predicted: Sequence[int], nodes: int = NODES) -> None:
        self.nodes, self._predicted = nodes, torch.tensor([list(predicted)])
        self._lookup = PromptLookupDrafter(nodes)
        self._texts: tuple[Tensor, Tensor] | None = None

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A tree below ``state.roots``."""
        texts = self._behind(state)
        before = texts.shape[1] - state.history.shape[1]
        return self._lookup.propose(replace(state, history=texts, positions=state.positions + before), cached)

    def _behind(self, state: DecodeState) -> Tensor:
        """The histories with the prediction before them, behind the prompt's end: so its beginning is found too.

        One buffer as long as the state's is one, for lookup remembers what it has seen of it.
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
