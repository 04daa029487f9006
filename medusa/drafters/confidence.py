"""How often guesses of a kind are right, learned as they are tried."""

import math
from collections.abc import Sequence

MEMORY = 64
"""Guesses of a kind that its figure reaches back, about."""
WEIGHT = 4
"""Guesses that the first belief counts as."""


class Confidence:
    """Shares of right guesses, by kind; what is long ago counts less and less.

    Several threads may observe: an observation that is lost does no harm.

    Args:
        beliefs: Share of each kind before anything was seen, between 0 and 1.
    """

    def __init__(self, beliefs: Sequence[float]) -> None:
        self._right = [WEIGHT * belief for belief in beliefs]
        self._tried = [float(WEIGHT)] * len(beliefs)

    def log(self, kind: int) -> float:
        """Logarithm of the share of a kind; the last kind stands for all above it."""
        kind = min(kind, len(self._right) - 1)
        return math.log(self._right[kind] / self._tried[kind])

    def observe(self, kind: int, right: bool) -> None:
        """One guess of a kind was right, or was not."""
        kind, keep = min(kind, len(self._right) - 1), 1 - 1 / MEMORY
        # A hundredth of a guess either way keeps shares from 0 and 1.
        self._right[kind] = keep * self._right[kind] + right + 0.01
        self._tried[kind] = keep * self._tried[kind] + 1.02
