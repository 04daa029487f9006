"""Merges several drafts of a text into one tree, on a CPU: equal paths are one, and the most likely nodes stay."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from medusa.tree import Draft, ragged

UNKNOWN = math.log(0.5)
"""Score per edge for drafts without scores."""
EDGE_COST = 1e-4
"""Keeps a parent's score above its child's if the child is certain."""


def node_floor(nodes: int) -> float:
    """Score below which a node of a tree of N nodes is not worth its row of a pass, on a CPU: log(1 / N).

    A row pays if the node's probability exceeds the row's price in tokens. The number of nodes is found by the clock
    (``medusa.budget``), and is small where rows cost much: so 1 / N stands for the price.
    """
    return -math.log(nodes)


class Node(NamedTuple):
    """A node of a merged tree: its token, its parent's index, its score and its depth."""

    token: int
    parent: int
    score: float
    depth: int


def merge(drafts: Sequence[Draft], nodes: int) -> Draft:
    """Merge the drafts of several drafters into one tree per sequence.

    Args:
        drafts: Drafts below the same roots, chosen and not drawn, with ``scores``. A path in several drafts gets the
            highest of their scores.
        nodes: N of the largest tree.

    Returns:
        Trees of the best nodes; ``Draft.sizes`` has the sizes if they differ.
    """
    columns = [(draft.tokens.tolist(), draft.parents.tolist(), _scores(draft), draft.row_sizes) for draft in drafts]
    rows = []
    for row in range(len(drafts[0].tokens)):
        tree = [Node(int(drafts[0].tokens[row, 0]), 0, 0.0, 0)]
        for tokens, parents, scores, sizes in columns:
            add(tree, tokens[row][: sizes[row]], parents[row], scores[row])
        rows.append(best(tree, nodes))
    return build(rows)


def add(tree: list[Node], tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> None:
    """Add the nodes of a draft to a tree; index 0 is the root of both."""
    known = {(node.parent, node.token): index for index, node in enumerate(tree) if index}
    places = [0]
    for token, parent, score in zip(tokens[1:], parents[1:], scores[1:], strict=False):
        above = places[parent]
        score = min(score, tree[above].score - EDGE_COST)
        place = known.setdefault((above, token), len(tree))
        if place == len(tree):
            tree.append(Node(token, above, score, tree[above].depth + 1))
        elif score > tree[place].score:
            tree[place] = tree[place]._replace(score=score)
        places.append(place)


def best(tree: Sequence[Node], count: int) -> list[Node]:
    """The tree of the best nodes; parents score above their children."""
    if len(tree) <= count:
        return list(tree)
    kept = sorted(sorted(range(len(tree)), key=lambda index: -tree[index].score)[:count])
    place = {index: new for new, index in enumerate(kept)}
    return [tree[index]._replace(parent=place[tree[index].parent]) for index in kept]


def build(rows: Sequence[Sequence[Node]]) -> Draft:
    """A draft of trees, one per sequence."""
    sizes = [len(row) for row in rows]
    nodes, filler = max(sizes), Node(0, 0, -math.inf, 0)
    full = [[*row, *[filler] * (nodes - len(row))] for row in rows]
    return Draft(
        torch.tensor([[node.token for node in row] for row in full]),
        torch.tensor([[node.parent for node in row] for row in full]),
        max(node.depth for row in rows for node in row),
        sizes=ragged(sizes),
        scores=torch.tensor([[node.score for node in row] for row in full], dtype=torch.float32),
    )


def _scores(draft: Draft) -> list[list[float]]:
    scores: list[list[float]] = (UNKNOWN * draft.depths if draft.scores is None else draft.scores).tolist()
    return scores
