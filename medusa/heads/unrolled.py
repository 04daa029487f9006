"""Attention of a layer that is trained on its own outputs: unrolled passes, each one token further ahead.

Legend: M positions of all documents, R of them where later passes compute, H attention heads, G key heads, d head size,
n documents, l positions and r rows of each.
"""

import torch
from torch import Tensor

from medusa.heads.documents import Documents


class Text:
    """Keys and values of unrolled passes. A row sees the first pass up to its position, and later passes at it only.

    Args:
        documents: The documents; passes after the first compute only where heads guess.

    Attributes:
        keys: [M, G, d] of the first pass, [R, G, d] of each later pass.
        values: The same shapes.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self.keys, self.values = list[Tensor](), list[Tensor]()

    def attend(self, query_RHd: Tensor) -> Tensor:
        """Attention outputs [R, H, d] for queries of the latest pass."""
        rows, passes = [query_RHd, self._documents.places, *self.keys[1:], *self.values[1:]], len(self.keys) - 1
        return self._documents.joined([
            _attend(query, self._documents.unseen(places, len(key[0])), key, value, own[:passes], own[passes:])
            for (key, value), (query, places, *own) in self._documents.groups([self.keys[0], self.values[0]], rows)
        ])  # fmt: skip


def _attend(
    query: Tensor, unseen: Tensor, key: Tensor, value: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """Attention of n documents: each of r rows sees some of the l positions, and its own row of later passes.

    Args:
        query: [n, r, H, d].
        unseen: Bool [n, r, l], the positions that a row does not see.
        key: [n, l, G, d] of the first pass.
        value: The same shape.
        keys: [n, r, G, d] of each later pass.
        values: The same shapes.

    Returns:
        [n, r, H, d].
    """
    length, groups, size = key.shape[1:]
    query = query.unflatten(2, (groups, -1))
    scores = [torch.einsum("nrghd,nlgd->ngrhl", query, key).masked_fill(unseen[:, None, :, None], -torch.inf)]
    scores += [torch.einsum("nrghd,nrgd->ngrh", query, own)[..., None] for own in keys]
    weights = (torch.cat(scores, dim=-1) * size**-0.5).softmax(-1)
    out = torch.einsum("ngrhl,nlgd->nrghd", weights[..., :length], value)
    for ahead, own in enumerate(values):
        out = out + weights[..., length + ahead].transpose(1, 2)[..., None] * own[:, :, :, None]
    return out.flatten(2, 3)
