"""Drafting by looking back: what followed the last words when they stood in the text before (Saxena 2023).

Costs next to nothing and needs no training. Completions that quote their prompt, code, and small models that repeat
themselves are full of it; new text is not, so it is at its best beside heads (``HybridDrafter``).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.drafters.base import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft

MAX_MATCH = 6
"""Tokens that are compared; of several places the one with the longest match counts, then the latest."""

LOOKUP_GUESSES = 10
"""Most tokens that are taken from the text before, beside what heads draft."""


class PromptLookupDrafter(Drafter):
    """Proposes the continuation of the best earlier match as a chain; where there is no match, the root alone.

    Shapes are fixed on a GPU: there a sequence without a match gets some chain too.

    Args:
        nodes: N, the root included.
        min_match: Tokens, the root among them, that must have stood together before; 1 to ``MAX_MATCH``.
        host_decides: On a CPU, propose the root alone where there is no match; no shape is fixed then.

    Raises:
        ValueError: The budget leaves no room for a guess.
    """

    def __init__(self, nodes: int, min_match: int = 2, host_decides: bool = True) -> None:
        if nodes < 2:
            raise ValueError(f"nodes ({nodes}) must be at least 2 for prompt lookup; give a larger tree budget")
        self.nodes, self.min_match, self.host_decides = nodes, min_match, host_decides
        self.recordable = not host_decides

    def propose(self, state: DecodeState) -> Draft:
        """A chain below ``state.roots``, found in ``state.history``."""
        return self.look_up(state)[0]

    def look_up(self, state: DecodeState) -> tuple[Draft, Tensor]:
        """That chain, and how many tokens agree at each sequence's best place, [B]; 0 where that is no match."""
        history_BT, root_B1 = state.history, state.positions[:, None]
        on_host = self.host_decides and history_BT.device.type == "cpu"
        recent_M = torch.arange(1 - MAX_MATCH, 1, device=history_BT.device)
        suffix_BM = history_BT.gather(1, (root_B1 + recent_M).clamp(min=0))
        index_T = torch.arange(history_BT.shape[1], device=history_BT.device)
        if on_host:
            history_BT = history_BT[:, : int(root_B1.max()) + 1]
            index_T = self._places(history_BT, suffix_BM)
            if not len(index_T):
                return Draft.chain(state.roots[:, None]), torch.zeros_like(state.roots)
        windows_BTM = pad(history_BT, (MAX_MATCH - 1, 0), value=-1).unfold(1, MAX_MATCH, 1)
        windows_BTM = windows_BTM[:, index_T] if on_host else windows_BTM
        same_BTM = (windows_BTM == suffix_BM[:, None]).flip(-1)
        match_BT = same_BTM.cumprod(-1, dtype=torch.int8).sum(-1)  # tokens that agree, counted back from each place
        length = history_BT.shape[1]
        score_BT = torch.where(index_T < root_B1, match_BT * length + index_T, -1)
        best_B1 = score_BT.amax(-1, keepdim=True)
        found_B = (best_B1[:, 0] >= self.min_match * length) & state.active
        matches_B, place_B1 = torch.where(found_B, best_B1[:, 0] // length, 0), best_B1.clamp(min=0) % length
        if on_host and not found_B.any():
            return Draft.chain(state.roots[:, None]), matches_B
        # A match that runs into the root goes on as it began: the text repeats with that period.
        ahead_N = torch.arange(self.nodes - 1, device=history_BT.device)
        source_BN = place_B1 + 1 + ahead_N % (root_B1 - place_B1).clamp(min=1)
        draft = Draft.chain(torch.cat([state.roots[:, None], history_BT.gather(1, source_BN)], dim=1))
        if on_host and not found_B.all():
            draft = draft.keeping(found_B[:, None] | (draft.depths == 0))
        return draft, matches_B

    def _places(self, history_BT: Tensor, suffix_BM: Tensor) -> Tensor:
        """Where the last tokens of any sequence stand before its end, as many of them as a match needs."""
        first = self.min_match - 1
        same_BT = torch.ones_like(history_BT[:, first:-1], dtype=torch.bool)
        for back in range(self.min_match):
            same_BT &= history_BT[:, first - back : -1 - back] == suffix_BM[:, -1 - back, None]
        return same_BT.any(0).nonzero()[:, 0] + first
