"""The best static tree for heads of known accuracy (paper section 2.3.3)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from medusa.tree import Tree

FIRST_GUESS, NEXT_GUESS = 0.5, 0.4
"""How often the best guess of a head is right where nothing is known about heads; each next rank less."""


@dataclass(frozen=True)
class GrownTree:
    """A tree, and what is expected of it.

    Attributes:
        tree: The topology.
        survivals: For each of ``tree.paths`` the probability that all of its tokens are right: the product of the
            exact-rank accuracies along it.
    """

    tree: Tree
    survivals: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a step: the base's own, and one for every node that survives."""
        return 1 + sum(self.survivals)


def grow_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> GrownTree:
    """The tree of the most expected tokens per step among all of at most ``nodes`` nodes.

    A node survives at most as often as its parent. So the likeliest nodes of all form a tree, and none of this size is
    better: it is grown by adding the likeliest node that is not in it yet. Nodes that never survive are left out.

    Args:
        accuracies: How often the r-th best token of head k is right where the tokens before it are: [K][R]. The tree
            has at most K levels of ranks below R.
        nodes: Its size with the root.

    Raises:
        ValueError: ``nodes`` is not positive.
    """
    if nodes < 1:
        raise ValueError(f"nodes ({nodes}) must be at least 1 (1 = the root alone); give a larger tree budget")
    # Noisy counts need not fall with the rank.
    orders = [sorted(range(len(row)), key=lambda rank: -row[rank]) for row in accuracies]
    found: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[float, tuple[int, ...], int, float]] = []

    def wait(parent: tuple[int, ...], survival: float, place: int) -> None:
        """Let the child at a place of its head's order wait for its turn; its next sibling will be less likely."""
        depth = len(parent)
        if depth < len(orders) and place < len(orders[depth]):
            rank = orders[depth][place]
            heapq.heappush(waiting, (-survival * accuracies[depth][rank], (*parent, rank), place, survival))

    wait((), 1.0, 0)
    while waiting and len(found) < nodes - 1:
        negative, path, place, above = heapq.heappop(waiting)
        if negative == 0:
            break
        found[path] = -negative
        wait(path[:-1], above, place + 1)
        wait(path, -negative, 0)
    tree = Tree(tuple(found))
    return GrownTree(tree, tuple(found[path] for path in tree.paths))


def typical_tree(nodes: int, depth: int) -> GrownTree:
    """The best tree for ``depth`` heads of which nothing is known: typical, and all alike."""
    accuracies = [FIRST_GUESS * NEXT_GUESS**rank for rank in range(nodes)]
    return grow_tree([accuracies] * depth, nodes)
