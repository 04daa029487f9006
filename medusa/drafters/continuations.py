"""What followed the last tokens of a text where they stood in it before; kernels/lookup.h does the same on a CPU.

A place weighs twice as much for every token that agrees there, and places that go on alike stand for one guess. The
guess's kind is how many tokens agree before it and its share of the weight; how often guesses of a kind were right
lately is what it is worth (``Confidence``).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from medusa.cpu.lookup import Search
from medusa.drafters.merge import Node

WEIGHT = 4
"""Guesses that the first belief counts as."""

Row = NDArray[numpy.int64]


class Confidence:
    """Shares of right guesses, by kind; what is long ago counts less and less.

    Several threads may observe: an observation that is lost does no harm.

    Args:
        search: Its kinds.
        belief: Share of every kind before anything was seen; None = a match of M tokens counts as M observations and
            doubt as one, so M / (M + 1) of a guess's share.

    Attributes:
        right: float64 ``search.kinds``, guesses that were right.
        tried: The same of all guesses.
    """

    def __init__(self, search: Search, belief: float | None = None) -> None:
        match, share = (torch.arange(size, dtype=torch.float64) for size in search.kinds)
        believed = torch.outer(match / (match + 1), (share + 0.5).clamp(max=search.shares) / search.shares)
        self.tried = torch.full(search.kinds, float(WEIGHT), dtype=torch.float64)
        self.right = self.tried * (believed if belief is None else belief)

    def log(self, kind: tuple[int, int]) -> float:
        """Logarithm of the share of a kind."""
        return math.log(self.right[kind].item() / self.tried[kind].item())

    def observe(self, kind: tuple[int, int], right: bool, keep: float) -> None:
        """One guess of a kind was right, or was not; ``keep`` of what was seen before stays."""
        # A hundredth of a guess either way keeps shares from 0 and 1.
        self.right[kind] = keep * self.right[kind].item() + right + 0.01
        self.tried[kind] = keep * self.tried[kind].item() + 1.02


class Place(NamedTuple):
    """Where the last token of a text stood before, and how many tokens agree there, back from it."""

    at: int
    match: int


class Guess(NamedTuple):
    """A token that follows some places, and its kind."""

    token: int
    kind: tuple[int, int]
    places: list[Place]


def find_places(text: Row, search: Search) -> list[Place]:
    """The longest matches, then the latest.

    Args:
        text: int64 [T].
        search: How many places count, and tokens.
    """
    at = numpy.flatnonzero(text[:-1] == text[-1])
    match, longer = numpy.ones_like(at), numpy.arange(len(at))
    for back in range(1, min(search.longest, len(text))):
        longer = longer[at[longer] >= back]
        longer = longer[text[at[longer] - back] == text[-1 - back]]
        match[longer] += 1
    order = numpy.lexsort((-at, -match))[: search.places]
    return [Place(*pair) for pair in zip(at[order].tolist(), match[order].tolist(), strict=True)]


def guesses(text: Row, places: Sequence[Place], depth: int, search: Search) -> list[Guess]:
    """What follows places of a text so far behind them; a text that repeats itself goes on doing so.

    Args:
        text: int64 [T], its root last.
        places: The longest match first.
        depth: 0 = right behind them.
        search: What kinds there are.
    """
    alike: dict[int, list[Place]] = {}
    for place in places:
        token = int(text[place.at + 1 + depth % (len(text) - 1 - place.at)])
        alike.setdefault(token, []).append(place)
    weights = [math.fsum(math.ldexp(1, place.match) for place in group) for group in alike.values()]
    whole = math.fsum(weights)
    found = []
    for (token, group), weight in zip(alike.items(), weights, strict=True):
        kind = min(group[0].match + depth, search.longest), int(weight / whole * search.shares)
        found.append(Guess(token, kind, group))
    return found


def judge(text: Row, root: int, confidence: Confidence, search: Search) -> None:
    """See which continuations of an earlier root were right, whether they were drafted or not."""
    before = text[: root + 1]
    places = find_places(before, search)
    for depth, token in enumerate(text[root + 1 :].tolist()):
        all_guesses, places = guesses(before, places, depth, search), []
        for guess in all_guesses:
            confidence.observe(guess.kind, guess.token == token, search.keep)
            if guess.token == token:
                places = guess.places


def grow(text: Row, confidence: Confidence, search: Search) -> list[Node]:
    """The tree of the likeliest nodes below the last token of a text; the root alone where there is no guess."""
    tree, waiting = [Node(int(text[-1]), 0, 0.0, 0)], list[tuple[float, int, Guess]]()
    places = find_places(text, search)
    while True:
        node = len(tree) - 1
        scored = [
            (tree[node].score + (confidence.log(guess.kind) - search.edge_cost), node, guess)
            for guess in guesses(text, places, tree[node].depth, search)
        ]
        scored = [one for one in scored if one[0] >= search.floor]
        waiting += [max(scored, key=lambda one: one[0])] if search.chain and scored else scored
        if not waiting or len(tree) == search.nodes:
            return tree
        best = max(range(len(waiting)), key=lambda index: waiting[index][0])
        score, parent, guess = waiting.pop(best)
        tree.append(Node(guess.token, parent, score, tree[parent].depth + 1))
        places = guess.places
