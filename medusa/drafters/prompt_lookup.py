"""Drafting by looking back: what followed the last words when they stood in the text before (Saxena 2023).

Costs next to nothing and needs no training. Completions that quote their prompt, code, and small models that repeat
themselves are full of it; new text is not, so it is at its best beside heads (``HybridDrafter``).
"""

import math
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from medusa.cache import CachedSequence
from medusa.drafters.base import Drafter
from medusa.drafters.merge import FLOOR, Node, add, best, build
from medusa.state import DecodeState
from medusa.tree import Draft

MAX_MATCH = 6
"""Tokens that are compared; of several places the one with the longest match counts, then the latest."""
LOOKUP_GUESSES = 10
"""Most tokens that are taken from the text before, beside what heads draft."""
PLACES = 3
"""Places whose continuations share a tree on a CPU, the best ones."""
BELIEFS = (0.5, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Share of right guesses by the tokens that agree before them, until some were seen; the last is ``MAX_MATCH``."""
MEMORY = 64
"""Guesses of a kind that its figure reaches back, about."""
WEIGHT = 4
"""Guesses that the first belief counts as."""

Row = NDArray[numpy.int64]


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


class PromptLookupDrafter(Drafter):
    """Proposes the continuations of the best earlier matches; where there is no match, the root alone.

    On a CPU they are a tree, whose nodes are worth what guesses after so long a match have been worth lately; unlikely
    ones are left out. On a GPU shapes are fixed: the continuation of the best place is a chain, and a sequence without
    a match gets some chain too.

    Args:
        nodes: N, the root included.
        min_match: Tokens, the root among them, that must have stood together before; 1 to ``MAX_MATCH``.
        host_decides: On a CPU, propose what there is; no shape is fixed then.
        confidence: Shared with other drafters of this kind; None = its own.
        places: Continuations that share a tree on a CPU, at most; 1 = a chain.

    Raises:
        ValueError: The budget leaves no room for a guess.
    """

    def __init__(
        self,
        nodes: int,
        min_match: int = 2,
        host_decides: bool = True,
        confidence: Confidence | None = None,
        places: int = PLACES,
    ) -> None:
        if nodes < 2:
            raise ValueError(f"nodes ({nodes}) must be at least 2 for prompt lookup; give a larger tree budget")
        self.nodes, self.min_match, self.host_decides = nodes, min_match, host_decides
        self.recordable, self._places = not host_decides, places
        self._confidence = confidence or Confidence(BELIEFS)
        self._last: tuple[Tensor, list[int], list[tuple[int, list[int]]]] | None = None

    def propose(self, state: DecodeState, _: Sequence[CachedSequence] = (), /) -> Draft:
        """A tree below ``state.roots``, found in ``state.history``."""
        if not (self.host_decides and state.roots.device.type == "cpu"):
            return self._chains(state)
        positions: list[int] = state.positions.tolist()
        history, active = state.history.numpy(), state.active.tolist()
        self._learn(state.history, history, positions)
        rows, guesses = [], []
        for row, position in enumerate(positions):
            text = history[row, : position + 1]
            tree = [Node(int(text[-1]), 0, 0.0, 0)]
            places = find_places(text, self.min_match, self._places) if active[row] else []
            found = [(match, self._continuation(text, place)) for place, match in places]
            for match, after in found:
                add(tree, [tree[0].token, *after], range(-1, self.nodes), self._scores(match))
            guesses.append(found[0] if found else (0, []))
            rows.append(best(tree, self.nodes))
        self._last = state.history, positions, guesses
        if all(len(row) == 1 for row in rows):
            return Draft.chain(state.roots[:, None])
        return build(rows)

    def _continuation(self, text: Row, place: int) -> list[int]:
        """What followed a place; a match that runs into the end goes on as it began: the text repeats so."""
        after: list[int] = text[place + 1 : place + self.nodes].tolist()
        while len(after) < self.nodes - 1:
            after += after
        return after[: self.nodes - 1]

    def _scores(self, match: int) -> list[float]:
        """Of the root and as many guesses as are worth it."""
        scores = [0.0]
        for ahead in range(self.nodes - 1):
            score = scores[-1] + self._confidence.log(match + ahead)
            if score < FLOOR:
                break
            scores.append(score)
        return scores

    def _learn(self, buffer: Tensor, history: Row, positions: list[int]) -> None:
        """See which of the last guesses were right. Where rows have joined or left, they are not judged."""
        if self._last is None or self._last[0] is not buffer:
            return
        for row, (before, (match, guesses)) in enumerate(zip(*self._last[1:], strict=True)):
            new = history[row, before + 1 : positions[row] + 1].tolist()
            for ahead, (guess, token) in enumerate(zip(guesses, new, strict=False)):
                self._confidence.observe(match + ahead, right := guess == token)
                if not right:
                    break

    def _chains(self, state: DecodeState) -> Draft:
        """The continuation of each sequence's best place, in shapes that follow from the history's."""
        history_BT, root_B1 = state.history, state.positions[:, None]
        recent_M = torch.arange(1 - MAX_MATCH, 1, device=history_BT.device)
        suffix_BM = history_BT.gather(1, (root_B1 + recent_M).clamp(min=0))
        index_T = torch.arange(history_BT.shape[1], device=history_BT.device)
        windows_BTM = pad(history_BT, (MAX_MATCH - 1, 0), value=-1).unfold(1, MAX_MATCH, 1)
        same_BTM = (windows_BTM == suffix_BM[:, None]).flip(-1)
        match_BT = same_BTM.cumprod(-1, dtype=torch.int8).sum(-1)  # tokens that agree, counted back from each place
        score_BT = torch.where(index_T < root_B1, match_BT * history_BT.shape[1] + index_T, -1)
        place_B1 = score_BT.amax(-1, keepdim=True).clamp(min=0) % history_BT.shape[1]
        ahead_N = torch.arange(self.nodes - 1, device=history_BT.device)
        source_BN = place_B1 + 1 + ahead_N % (root_B1 - place_B1).clamp(min=1)
        return Draft.chain(torch.cat([state.roots[:, None], history_BT.gather(1, source_BN)], dim=1))


def find_places(text: Row, min_match: int, most: int) -> list[tuple[int, int]]:
    """Where the last tokens of a text stand before its end, with how many agree: the longest matches, then the latest.

    Args:
        text: int64 [T].
        min_match: Tokens that must agree.
        most: Places, at most.
    """
    places = numpy.flatnonzero(text[:-1] == text[-1])
    by_match = [places]
    for back in range(1, min(MAX_MATCH, len(text))):
        places = places[places >= back]
        places = places[text[places - back] == text[-1 - back]]
        if not len(places):
            break
        by_match.append(places)
    found: dict[int, int] = {}
    for match, level in sorted(enumerate(by_match, start=1), reverse=True):
        if match >= min_match:
            for place in reversed(level[-most:].tolist()):
                found.setdefault(place, match)
    return list(found.items())[:most]
