"""Several drafters in one tree: their trees share the root, and the most likely nodes are kept."""

from collections.abc import Sequence
from functools import reduce

from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.drafters.merge import merge
from medusa.state import DecodeState
from medusa.tree import Draft

ENOUGH = 1.5
"""Expected number of right guesses of cheap drafters above which the costly one is left out."""


class HybridDrafter(Drafter):
    """Combines the drafts of several drafters; a lossless rule picks the longest right path of any of them.

    On a CPU equal paths are merged and the ``nodes`` best nodes are kept, by their drafters' own scores. On a GPU,
    where shapes are fixed and the host does not wait for the device, all trees are verified.

    Args:
        cheap: Drafters that cost almost nothing.
        dear: Drafters that cost time, for example heads; left out for a single sequence on a CPU if the cheap ones
            expect enough right guesses.
        nodes: N of the merged tree.
        chain: Drafts are chains, and the one with the most expected right guesses is proposed.
    """

    def __init__(self, cheap: Sequence[Drafter], dear: Sequence[Drafter], nodes: int, chain: bool = False) -> None:
        self.cheap, self.dear = list(cheap), list(dear)
        self._merged, self._chain = nodes, chain
        everyone = [*self.cheap, *self.dear]
        self.nodes = max(nodes, 1 + sum(drafter.nodes - 1 for drafter in everyone))
        self.recordable = all(drafter.recordable for drafter in everyone)
        self.observers = [one for drafter in everyone for one in drafter.observers]
        self.places = max((drafter.places for drafter in everyone), default=0)
        self.sees_base = any(drafter.sees_base for drafter in everyone)

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A draft below ``state.roots``."""
        drafts = [drafter.propose(state, cached) for drafter in self.cheap]
        on_host = state.roots.device.type == "cpu" and not self.recordable
        if not (on_host and len(state.roots) == 1 and _expected(drafts) >= ENOUGH):
            drafts = [*(drafter.propose(state, cached) for drafter in self.dear), *drafts]
        drafts = [draft for draft in drafts if draft.tokens.shape[1] > 1] or drafts[:1]
        if self._chain:
            return max(drafts, key=lambda draft: _expected([draft]))
        if len(drafts) == 1 and drafts[0].tokens.shape[1] <= self._merged:
            return drafts[0]
        if on_host and all(draft.probs is None for draft in drafts):
            return merge(drafts, self._merged)
        return reduce(Draft.join, drafts)


def _expected(drafts: Sequence[Draft]) -> float:
    """Expected number of right guesses of the best draft for one sequence."""
    known = [draft.scores for draft in drafts if draft.scores is not None]
    return max((float(scores_1N[:, 1:].exp().sum()) for scores_1N in known), default=0.0)
