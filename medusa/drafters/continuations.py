"""Continuations of earlier occurrences of a text's last tokens, in it or in earlier texts.

kernels/lookup.h is the same in C++, for CPUs.

The weight of a place doubles with every matching token, and places with the same continuation are one guess. The kind
of a guess is its number of matching tokens and its share of the weight. Its probability is the share of recent guesses
of this kind that were right (``Confidence``).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy
import torch
from numpy.typing import NDArray

from medusa.cpu.lookup import EarlierTexts, Search
from medusa.drafters.merge import EDGE_COST, Node

SEARCH = Search(nodes=0, chain=False, places=32, longest=16, shares=5, floor=0.0, edge_cost=EDGE_COST, keep=1 - 1 / 256)
"""Limits of the search; each drafter has its own number of nodes and floor."""
WEIGHT = 4
"""Number of guesses that the prior counts as."""

Row = NDArray[numpy.int64]


class Confidence:
    """Shares of right guesses by kind, with decaying counts.

    The prior is M / (M + 1) of a guess's share for a match of M tokens, as if M of M + 1 observations were right.
    Several threads may observe: a lost observation does no harm.

    Args:
        search: Defines the kinds.

    Attributes:
        right: float64 ``search.kinds``, counts of right guesses.
        tried: The same shape, counts of all guesses.
    """

    def __init__(self, search: Search) -> None:
        match, share = (torch.arange(size, dtype=torch.float64) for size in search.kinds)
        believed = torch.outer(match / (match + 1), (share + 0.5).clamp(max=search.shares) / search.shares)
        self.tried = torch.full(search.kinds, float(WEIGHT), dtype=torch.float64)
        self.right = self.tried * believed

    def log(self, kind: tuple[int, int]) -> float:
        """Logarithm of the share of a kind."""
        return math.log(self.right[kind].item() / self.tried[kind].item())

    def observe(self, kind: tuple[int, int], right: bool, keep: float) -> None:
        """Observe whether a guess of a kind was right; earlier counts are multiplied by ``keep``."""
        # A hundredth of a guess on both sides keeps shares off 0 and 1.
        self.right[kind] = keep * self.right[kind].item() + right + 0.01
        self.tried[kind] = keep * self.tried[kind].item() + 1.02


class Place(NamedTuple):
    """An earlier place of a text's last token, and the number of matching tokens up to it."""

    at: int
    match: int


class Guess(NamedTuple):
    """A token that follows some places, and its kind."""

    token: int
    kind: tuple[int, int]
    places: list[Place]


class Texts(Protocol):
    """Where continuations are looked for."""

    @property
    def tables(self) -> EarlierTexts | None:
        """The same for the C++ search; None = the text itself."""

    def find(self, text: Row, search: Search) -> list[Place]:
        """Earlier places of the last tokens of a text, the longest matches first, then the latest.

        Args:
            text: int64 [T].
            search: Limits of places and compared tokens.
        """

    def after(self, text: Row, place: Place, depth: int) -> int:
        """The token at a depth behind a place, 0 = right after it; -1 = its text has ended."""


class OwnText:
    """The text itself."""

    tables = None

    def find(self, text: Row, search: Search) -> list[Place]:
        """See ``Texts``."""
        at = numpy.flatnonzero(text[:-1] == text[-1])
        match, longer = numpy.ones_like(at), numpy.arange(len(at))
        for back in range(1, min(search.longest, len(text))):
            longer = longer[at[longer] >= back]
            longer = longer[text[at[longer] - back] == text[-1 - back]]
            match[longer] += 1
        order = numpy.lexsort((-at, -match))[: search.places]
        return [Place(*pair) for pair in zip(at[order].tolist(), match[order].tolist(), strict=True)]

    def after(self, text: Row, place: Place, depth: int) -> int:
        """See ``Texts``; a continuation that reaches the text's end continues with the repetition."""
        return int(text[place.at + 1 + depth % (len(text) - 1 - place.at)])


def guesses(text: Row, places: Sequence[Place], depth: int, search: Search, texts: Texts) -> list[Guess]:
    """Guesses at a depth after the places.

    Args:
        text: int64 [T], the root last.
        places: Places, the longest match first.
        depth: 0 = the token right after them.
        search: Defines the kinds.
        texts: Where the places are.
    """
    alike: dict[int, list[Place]] = {}
    for place in places:
        if (token := texts.after(text, place, depth)) >= 0:
            alike.setdefault(token, []).append(place)
    weights = [math.fsum(math.ldexp(1, place.match) for place in group) for group in alike.values()]
    whole = math.fsum(weights)
    found = []
    for (token, group), weight in zip(alike.items(), weights, strict=True):
        kind = min(group[0].match + depth, search.longest), int(weight / whole * search.shares)
        found.append(Guess(token, kind, group))
    return found


def judge(text: Row, root: int, confidence: Confidence, search: Search, texts: Texts) -> None:
    """Observe which continuations of an earlier root were right, drafted or not."""
    before = text[: root + 1]
    places = texts.find(before, search)
    for depth, token in enumerate(text[root + 1 :].tolist()):
        all_guesses, places = guesses(before, places, depth, search, texts), []
        for guess in all_guesses:
            confidence.observe(guess.kind, guess.token == token, search.keep)
            if guess.token == token:
                places = guess.places


def grow(text: Row, confidence: Confidence, search: Search, texts: Texts) -> list[Node]:
    """The tree of the most likely nodes below the last token of a text; only the root if there is no guess."""
    tree, waiting = [Node(int(text[-1]), 0, 0.0, 0)], list[tuple[float, int, Guess]]()
    places = texts.find(text, search)
    while True:
        node = len(tree) - 1
        scored = [
            (tree[node].score + (confidence.log(guess.kind) - search.edge_cost), node, guess)
            for guess in guesses(text, places, tree[node].depth, search, texts)
        ]
        scored = [one for one in scored if one[0] >= search.floor]
        waiting += [max(scored, key=lambda one: one[0])] if search.chain and scored else scored
        if not waiting or len(tree) == search.nodes:
            return tree
        best = max(range(len(waiting)), key=lambda index: waiting[index][0])
        score, parent, guess = waiting.pop(best)
        tree.append(Node(guess.token, parent, score, tree[parent].depth + 1))
        places = guess.places
