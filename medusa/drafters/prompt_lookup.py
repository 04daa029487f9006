"""Prompt lookup: drafts what followed earlier occurrences of the last tokens in the text.

It costs almost nothing and needs no training. It helps with completions that quote their prompt, with code, and with
small models that repeat themselves, but not with new text, so it works best together with heads (``HybridDrafter``).
It is prompt lookup (Saxena 2023), by the longest match and by frequency as in suffix decoding (Oliaro et al. 2024).
"""

import torch
from torch.nn.functional import pad

from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.drafters.continuations import SEARCH, Confidence, OwnText
from medusa.drafters.merge import node_floor
from medusa.drafters.search import TreeSearch
from medusa.state import DecodeState
from medusa.tree import Draft

LOOKUP_GUESSES = 10
"""Most tokens that are copied from the text, in addition to drafts of heads."""
MAX_MATCH = 6
"""Number of compared tokens with fixed shapes."""


class PromptLookupDrafter(Drafter):
    """Proposes continuations of earlier matches; only the root if there is no match.

    On a CPU the draft is a tree of the most likely ones, without unlikely ones. On a GPU shapes are fixed: the draft is
    a chain, the continuation of the longest match (the latest of several), and a sequence without a match gets an
    arbitrary chain.

    Args:
        nodes: N, the root included.
        host_decides: On a CPU: propose existing matches only, so that shapes vary.
        confidence: Shared with other drafters of this kind; None = its own.
        chain: Propose chains only.
        floor: Score below which a guess is left out on a CPU; None = that of a tree of N nodes.

    Raises:
        ValueError: The budget leaves no room for a guess.
    """

    def __init__(
        self,
        nodes: int,
        host_decides: bool = True,
        confidence: Confidence | None = None,
        chain: bool = False,
        floor: float | None = None,
    ) -> None:
        if nodes < 2:
            raise ValueError(f"nodes ({nodes}) must be at least 2 for prompt lookup; give a larger tree budget")
        self.nodes, self.host_decides, self.recordable = nodes, host_decides, not host_decides
        floor = node_floor(nodes) if floor is None else floor
        self._confidence = confidence or Confidence(SEARCH)
        self._search = TreeSearch(SEARCH._replace(nodes=nodes, chain=chain, floor=floor), self._confidence, OwnText())

    def propose(self, state: DecodeState, _: Cached = (), /) -> Draft:
        """A tree below ``state.roots``, found in ``state.history``."""
        on_host = self.host_decides and state.roots.device.type == "cpu"
        return self._search(state) if on_host else self._chains(state)

    def _chains(self, state: DecodeState) -> Draft:
        """The continuation of each sequence's best place, in shapes that depend on the history's only."""
        history_BT, root_B1 = state.history, state.positions[:, None]
        recent_M = torch.arange(1 - MAX_MATCH, 1, device=history_BT.device)
        suffix_BM = history_BT.gather(1, (root_B1 + recent_M).clamp(min=0))
        index_T = torch.arange(history_BT.shape[1], device=history_BT.device)
        windows_BTM = pad(history_BT, (MAX_MATCH - 1, 0), value=-1).unfold(1, MAX_MATCH, 1)
        same_BTM = (windows_BTM == suffix_BM[:, None]).flip(-1)
        match_BT = same_BTM.cumprod(-1, dtype=torch.int8).sum(-1)  # matching tokens up to each place
        score_BT = torch.where(index_T < root_B1, match_BT * history_BT.shape[1] + index_T, -1)
        place_B1 = score_BT.amax(-1, keepdim=True).clamp(min=0) % history_BT.shape[1]
        ahead_N = torch.arange(self.nodes - 1, device=history_BT.device)
        source_BN = place_B1 + 1 + ahead_N % (root_B1 - place_B1).clamp(min=1)
        return Draft.chain(torch.cat([state.roots[:, None], history_BT.gather(1, source_BN)], dim=1))
