"""Two drafters under one verifier: both trees hang below the same root."""

from medusa.drafters.base import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft


class HybridDrafter(Drafter):
    """Proposes what both drafters propose; a lossless rule picks the longer right path, from either drafter.

    Args:
        first: One drafter, the heads for example.
        second: Another, prompt lookup for example.
        shortcut: Asked before them for a single sequence on a CPU: what it proposes is drafted alone, so that a guess
            that is nearly certain and free saves the time of the others.
    """

    def __init__(self, first: Drafter, second: Drafter, shortcut: Drafter | None = None) -> None:
        self.first, self.second, self.shortcut = first, second, shortcut
        self.nodes = max(first.nodes + second.nodes - 1, shortcut.nodes if shortcut else 1)
        self.recordable = shortcut is None and first.recordable and second.recordable

    def propose(self, state: DecodeState) -> Draft:
        """The union of both drafts; a token that both propose stands twice."""
        if self.shortcut is not None and len(state.roots) == 1 and state.roots.device.type == "cpu":
            draft = self.shortcut.propose(state)
            if draft.tokens.shape[1] > 1:
                return draft
        first, second = self.first.propose(state), self.second.propose(state)
        return first if second.tokens.shape[1] == 1 else first.join(second)
