"""Drafting with the first layers of the base: no second model, no training, and no additional cache.

The middle layers of a model are not trained to predict tokens. On most bases early exit pays after more than half of
the layers, or not at all; ``nodes=None`` measures it. Bases that were trained for it (LayerSkip) are better.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.drafters.model import ROW_COST, ModelDrafter
from medusa.drafters.writers import FirstLayers
from medusa.state import DecodeState
from medusa.tree import Draft

logger = logging.getLogger(__name__)

CANDIDATES = 8
"""Number of parts of the layers; exits between the parts are tried."""
FEWEST, MOST = 32, 256
"""Bounds of the tokens of a text on which exits are tried."""


class ExitLayer:
    """The exit layer: the one with the highest expected tokens per second on the first text.

    Args:
        base: The base, prepared for decoding.

    Attributes:
        base: As given.
        model: The base's layers up to it; None = it is not known yet.
    """

    def __init__(self, base: BaseModel) -> None:
        self.base = base
        self.model: BaseModel | None = None

    def find(self, state: DecodeState) -> BaseModel | None:
        """The base's first layers; None while all texts are shorter than ``FEWEST`` tokens."""
        if self.model is None:
            lengths_B = torch.where(state.active, state.positions + 1, 0)
            row = int(lengths_B.argmax())
            if lengths_B[row] >= FEWEST:
                self.model = self._choose(state.history[row, : lengths_B[row]][:MOST])
        return self.model

    def _choose(self, text_T: Tensor) -> BaseModel:
        base, total = self.base, self.base.num_layers
        right_T = self._guesses(base, text_T)
        rates = {}
        for layer in sorted({max(1, total * part // CANDIDATES) for part in range(1, CANDIDATES)} - {total}):
            guesses_T = self._guesses(base.shallow(layer), text_T)
            rates[layer] = float((guesses_T == right_T).float().mean())
        best = max(rates, key=lambda layer: _promise(rates[layer], layer / total))
        text = "early exit after layer %d of %d: right for %.0f %% of %d tokens"
        logger.info(text, best, total, 100 * rates[best], len(text_T))
        return base.shallow(best)

    @staticmethod
    def _guesses(model: BaseModel, text_T: Tensor) -> Tensor:
        return model.logits(model.hidden_states(text_T[None])[0]).argmax(-1)


def _promise(rate: float, cost: float) -> float:
    """Expected tokens per plain step of the base with the best length of drafts."""
    tokens = [sum(rate**depth for depth in range(length + 1)) for length in range(1, CANDIDATES)]
    return max(tokens[length - 1] / (1 + length * (cost + ROW_COST)) for length in range(1, CANDIDATES))


class EarlyExitDrafter(Drafter):
    """Proposes the tokens that the base's first layers predict.

    Args:
        exit_layer: The exit layer of the base that verifies, shared with other drafters of this base.
        nodes: N, the root included, at least 2.
        **how: ``host_decides``, ``noise``, ``drawn`` and ``stream``, see ``ModelDrafter``.

    Raises:
        ValueError: The budget leaves no room for a guess.
    """

    sees_base = True

    def __init__(self, exit_layer: ExitLayer, nodes: int, **how: Any) -> None:
        if nodes < 2:
            raise ValueError(f"nodes ({nodes}) must be at least 2 for an early exit; give a larger tree budget")
        self.nodes, self._exit, self._how = nodes, exit_layer, how
        self._drafter: ModelDrafter | None = None

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A draft below ``state.roots``; only the roots until a text is long enough to choose the exit layer."""
        if self._drafter is None:
            base, model = self._exit.base, self._exit.find(state)
            if model is None:
                return Draft.chain(state.roots[:, None])
            cost = model.num_layers / base.num_layers
            self._drafter = ModelDrafter(FirstLayers(model), base.vocab_size, self.nodes, cost, width=1, **self._how)
        return self._drafter.propose(state, cached)
