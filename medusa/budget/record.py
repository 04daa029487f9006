"""What became of drafts: read from the text that was written since, whoever else drafted beside."""

from collections.abc import Sequence

from medusa.state import DecodeState
from medusa.tree import Draft

KEEP = 1 - 1 / 64
"""Of what was seen before, at each new observation: averages reach back about so many of them."""


class Average:
    """A ratio of two sums in which what is long ago counts less and less.

    Args:
        prior: What it is taken for at first.
        weight: How much of the denominator must be seen to outweigh that.
    """

    def __init__(self, prior: float, weight: float) -> None:
        self._prior, self._weight = prior, weight
        self._above = self._below = 0.0

    def add(self, above: float, below: float) -> None:
        """Observe both sums grow."""
        self._above, self._below = KEEP * self._above + above, KEEP * self._below + below

    @property
    def value(self) -> float:
        """The ratio."""
        return (self._prior * self._weight + self._above) / (self._weight + self._below)


def written(before: DecodeState, now: DecodeState) -> list[list[int]] | None:
    """The tokens of each sequence since an earlier state of the same completions; None where it is of others.

    Both share one buffer, until the cache grows and it is moved: then what was drafted last is not judged.
    """
    if before.history is not now.history:
        return None
    spans = zip(now.history, before.positions.tolist(), now.positions.tolist(), strict=True)
    return [row_T[begin + 1 : end + 1].tolist() for row_T, begin, end in spans]


def agreement(draft: Draft, texts: Sequence[Sequence[int]]) -> list[int]:
    """How far each sequence's tree is right: the depth of its path that the text went along.

    Args:
        draft: Trees below the roots.
        texts: What followed the roots.
    """
    trees = zip(draft.tokens.tolist(), draft.parents.tolist(), texts, strict=True)
    return [_follow(tokens, parents, text) for tokens, parents, text in trees]


def _follow(tokens: list[int], parents: list[int], text: Sequence[int]) -> int:
    node = 0
    for depth, token in enumerate(text):
        children = range(node + 1, len(tokens))
        node = next((child for child in children if parents[child] == node and tokens[child] == token), 0)
        if node == 0:
            return depth
    return len(text)
