"""Token trees: ``Tree`` is a static topology on the host, ``Draft`` a batch of filled trees on the device.

Nodes are stored so that a parent always comes before its children; node 0 is the root, the newest committed token.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from medusa.cpu import native, selection


@dataclass(frozen=True)
class Tree:
    """A tree of rank paths: the path (0, 2) is the third best token of head 2 below the best token of head 1.

    Attributes:
        paths: One path per draft node, sorted by depth; every prefix of a path is a path too. The root is not listed.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(map(tuple, self.paths)))  # others' trees are lists of lists
        known = set(self.paths)
        if len(known) != len(self.paths) or () in known:
            raise ValueError("tree paths must be different and not empty; remove the repeated or empty ones")
        for path in self.paths:
            if not all(type(rank) is int and rank >= 0 for rank in path):
                raise ValueError(f"tree path ({path}) has a rank that is no whole number from 0 on; correct it")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"tree path ({path}) has no parent {path[:-1]} in the tree; add the parent")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> "Tree":
        """The best token of each of ``depth`` heads, one below the other."""
        if depth < 0:
            raise ValueError(f"depth ({depth}) is negative; raise it")
        return cls(tuple((0,) * d for d in range(1, depth + 1)))

    @classmethod
    def full(cls, widths: Sequence[int]) -> "Tree":
        """All combinations of the ``widths[d]`` best tokens at depth d + 1."""
        if min(widths, default=1) < 1:
            raise ValueError(f"widths ({list(widths)}) must be at least 1 each; raise them")
        return cls(tuple(path for d in range(1, len(widths) + 1) for path in product(*map(range, widths[:d]))))

    @property
    def nodes(self) -> int:
        """N, the number of nodes with the root."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Length of the longest path; the number of heads that the tree needs."""
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """Number of best tokens that the tree needs of a head: its highest rank + 1."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @cached_property
    def parents(self) -> Tensor:
        """[N] index of each node's parent; the root is its own."""
        index = {path: i + 1 for i, path in enumerate(self.paths)} | {(): 0}
        return torch.tensor([0, *(index[path[:-1]] for path in self.paths)])


def ancestor_mask(parents_N: Tensor, depth: int) -> Tensor:
    """The ancestors of each node, in trees of at most ``depth`` edges.

    Args:
        parents_N: [..., N] int64 index of each node's parent; the root's is the root.
        depth: Longest path.

    Returns:
        [..., N, N] bool: entry (i, j) is true where j is i or an ancestor of i.
    """
    nodes = parents_N.shape[-1]
    # Powers of (itself + parent): squaring doubles the distance that they reach.
    reach_NN = torch.eye(nodes, device=parents_N.device).expand(*parents_N.shape, nodes)
    reach_NN = reach_NN.scatter(-1, parents_N[..., None], 1.0)
    for _ in range(max(0, depth - 1).bit_length()):
        reach_NN = (reach_NN @ reach_NN).clamp_(max=1.0)
    return reach_NN > 0


def ragged(sizes: Sequence[int]) -> tuple[int, ...] | None:
    """``Draft.sizes`` of trees of these sizes."""
    return tuple(sizes) if min(sizes) < max(sizes) else None


@dataclass(frozen=True)
class Draft:
    """A batch of token trees of one size, on the device.

    Attributes:
        tokens: [B, N] int64; column 0 holds the roots.
        parents: [B, N] int64 index of each node's parent, always smaller than the node's own; 0 for the root.
        depth: Largest depth that any of the trees can have (a number on the host, from which shapes follow).
        probs: [B, N, V] if tokens were drawn: row n is the distribution that node n's token was drawn from, given the
            tokens drawn before it; the root's row is not read. None if all tokens were chosen (one-hot rows).
        parts: If rows were drafted separately: the rows [b] of each part, and their draft. See ``stack``.
        straight: Whether every node's parent is the node before it.
        sizes: Number of nodes of each tree, the root included, if some trees have fewer than N. The columns after them
            are padding, which no path takes. Only on a CPU, since these are numbers on the host.
        scores: [B, N] log-probability of the path from the root to each node, as the drafter estimates it; None if it
            gives no estimate.
        together: Whether nodes see their whole tree, not only their ancestors. Such rows are never verified.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    probs: Tensor | None = None
    parts: tuple[tuple[Tensor, "Draft"], ...] = ()
    straight: bool = False
    sizes: tuple[int, ...] | None = None
    scores: Tensor | None = None
    together: bool = False

    @property
    def row_sizes(self) -> Sequence[int]:
        """Number of nodes of each tree, also if all are equal."""
        batch, nodes = self.tokens.shape
        return self.sizes or (nodes,) * batch

    def flat(self, rows_BN: Tensor) -> Tensor:
        """Rows [R, ...] of the trees' nodes out of [B, N, ...], without padding, sequence by sequence."""
        return rows_BN.flatten(0, 1) if self.real is None else rows_BN[self.real]

    def spread(self, rows_RF: Tensor) -> Tensor:
        """Rows [R, F] of the nodes as [B, N, F], with 0 in the padding of smaller trees."""
        if self.real is None:
            return rows_RF.view(*self.tokens.shape, -1)
        return rows_RF.new_zeros(*self.tokens.shape, rows_RF.shape[-1]).masked_scatter_(self.real[..., None], rows_RF)

    @cached_property
    def real(self) -> Tensor | None:
        """[B, N] bool, true for nodes and false for padding; None if there is no padding."""
        if self.sizes is None:
            return None
        device = self.tokens.device
        sizes_B1 = torch.tensor(self.sizes, device=device)[:, None]
        return torch.arange(self.tokens.shape[1], device=device) < sizes_B1

    @cached_property
    def depths(self) -> Tensor:
        """[B, N] int64 edges from the root."""
        if self.straight:
            return torch.arange(self.depth + 1, device=self.tokens.device).expand(self.tokens.shape)
        if native.reads_indices(self.parents):
            return selection.depths(self.parents)
        return self.ancestors.sum(-1) - 1

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool; entry (i, j) is true where j is i or an ancestor of i, or all are ``together``."""
        if self.together:
            return torch.ones_like(self.tokens, dtype=torch.bool)[:, None].expand(-1, self.tokens.shape[1], -1)
        if self.straight:
            index_N = torch.arange(self.depth + 1, device=self.tokens.device)
            return (index_N[:, None] >= index_N).expand(len(self.tokens), -1, -1)
        return ancestor_mask(self.parents, self.depth)

    @classmethod
    def stack(cls, parts: Sequence[tuple[Tensor, "Draft"]]) -> "Draft":
        """One draft of rows that were drafted separately; small trees are padded with nodes that no path takes.

        Args:
            parts: The rows [b] of each part, and their draft; every row is in one part. Distributions stay there.
        """
        rows, nodes = sum(len(index) for index, _ in parts), max(part.tokens.shape[1] for _, part in parts)
        tokens_BN = parts[0][1].tokens.new_zeros(rows, nodes)
        parents_BN = torch.zeros_like(tokens_BN)
        for index, part in parts:
            size = part.tokens.shape[1]
            tokens_BN[index] = part.tokens[:, :1]
            tokens_BN[index, :size], parents_BN[index, :size] = part.tokens, part.parents
        depth, sizes = max(part.depth for _, part in parts), [nodes] * rows
        if tokens_BN.device.type == "cpu":
            for index, part in parts:
                for row, size in zip(index.tolist(), part.row_sizes, strict=True):
                    sizes[row] = size
        return cls(tokens_BN, parents_BN, depth, parts=tuple(parts), sizes=ragged(sizes))

    def keeping(self, real_BN: Tensor) -> "Draft":
        """The trees with these nodes only, on a CPU; they must include the root and the parent of each kept node.

        N becomes the size of the largest remaining tree; ``sizes`` has the sizes if they differ.
        """
        sizes: list[int] = real_BN.sum(1).tolist()
        order_BN = (~real_BN).long().argsort(dim=1, stable=True)
        place_BN = torch.empty_like(order_BN).scatter_(1, order_BN, torch.arange(order_BN.shape[1]).expand_as(order_BN))
        parents_BN = place_BN.gather(1, self.parents.gather(1, order_BN)) * real_BN.gather(1, order_BN)
        nodes, tokens_BN = max(sizes), self.tokens.gather(1, order_BN)
        kept = Draft.of(tokens_BN[:, :nodes], parents_BN[:, :nodes], self.depth)
        probs_BNV = self.probs
        if probs_BNV is not None:
            probs_BNV = probs_BNV.gather(1, order_BN[:, :nodes, None].expand(-1, -1, probs_BNV.shape[2]))
        scores_BN = None if self.scores is None else self.scores.gather(1, order_BN)[:, :nodes]
        return dataclasses.replace(kept, probs=probs_BNV, sizes=ragged(sizes), scores=scores_BN)

    @classmethod
    def of(cls, tokens_BN: Tensor, parents_BN: Tensor, depth: int, probs_BNV: Tensor | None = None) -> "Draft":
        """Trees given by the tokens and the parent of each node, of at most ``depth`` edges from root to leaf."""
        return cls(tokens_BN, parents_BN.to(tokens_BN.device), min(depth, tokens_BN.shape[1] - 1), probs_BNV)

    @classmethod
    def chain(cls, tokens_BT: Tensor, sizes: Sequence[int] | None = None) -> "Draft":
        """A plain row of tokens, each the parent of the next: one token is plain decoding, many are a prefill.

        Args:
            tokens_BT: Token ids.
            sizes: Number of tokens of each row, if some have fewer; 0 = none.
        """
        batch, length = tokens_BT.shape
        if length == 1 and sizes is None:
            return cls(tokens_BT, torch.zeros_like(tokens_BT), 0, straight=True)
        parents_T = torch.arange(-1, length - 1, device=tokens_BT.device).clamp(min=0)
        uneven = None if sizes is None else ragged(sizes)
        return cls(tokens_BT, parents_T.expand(batch, -1), length - 1, straight=True, sizes=uneven)

    def alone(self, index: int) -> "Draft":
        """The tree of one sequence, for a pass: tokens and parents only."""
        nodes = self.row_sizes[index]
        tokens_1N, parents_1N = (tensor[index, None, :nodes] for tensor in (self.tokens, self.parents))
        return Draft(tokens_1N, parents_1N, min(self.depth, nodes - 1), straight=self.straight)

    def join(self, other: "Draft") -> "Draft":
        """Both trees of each sequence below their common root; the other draft's nodes come after all of ours."""
        behind, parents_BM = self.tokens.shape[1] - 1, other.parents[:, 1:]
        parents_BM = torch.where(parents_BM == 0, 0, parents_BM + behind)
        joined = Draft(
            torch.cat([self.tokens, other.tokens[:, 1:]], dim=1),
            torch.cat([self.parents, parents_BM], dim=1),
            max(self.depth, other.depth),
            self._join_probs(other),
        )
        if self.sizes is None and other.sizes is None:
            return joined
        real = [torch.ones_like(x.tokens, dtype=torch.bool) if x.real is None else x.real for x in (self, other)]
        return joined.keeping(torch.cat([real[0], real[1][:, 1:]], dim=1))

    def _join_probs(self, other: "Draft") -> Tensor | None:
        drawn = self.probs if self.probs is not None else other.probs
        if drawn is None:
            return None
        vocabulary_V = torch.arange(drawn.shape[-1], device=drawn.device)
        ours, theirs = (
            draft.probs if draft.probs is not None else (draft.tokens[..., None] == vocabulary_V).to(drawn.dtype)
            for draft in (self, other)
        )
        return torch.cat([ours, theirs[:, 1:]], dim=1)
