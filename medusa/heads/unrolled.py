"""Attention of a layer that is trained on its own outputs: unrolled passes, each one token further ahead.

Legend: M positions of all documents, R of them where later passes compute, H attention heads, G key heads, d head size,
L positions of a document.
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
        """Attention outputs [R, H, d] for queries of the latest pass; documents are computed separately."""
        texts = self._documents.of_text(self.keys[0], self.values[0])
        rows = self._documents.of_wanted(query_RHd, self._documents.places, *self.keys[1:], *self.values[1:])
        passes = len(self.keys) - 1
        return torch.cat([
            _attend(query, places, key, value, own[:passes], own[passes:])
            for (key, value), (query, places, *own) in zip(texts, rows, strict=True)
        ])  # fmt: skip


def _attend(
    query_RHd: Tensor, places_R: Tensor, key_LGd: Tensor, value_LGd: Tensor, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """Attention of one document: each of R rows sees the L positions up to its own, and its own row of later passes."""
    length, groups, size = key_LGd.shape
    query_GRhd = query_RHd.unflatten(1, (groups, -1)).transpose(0, 1)
    hidden_RL = torch.arange(length, device=places_R.device) > places_R[:, None]
    scores = [torch.einsum("grhd,lgd->grhl", query_GRhd, key_LGd).masked_fill(hidden_RL[:, None], -torch.inf)]
    scores += [torch.einsum("grhd,rgd->grh", query_GRhd, key)[..., None] for key in keys]
    weights = (torch.cat(scores, dim=-1) * size**-0.5).softmax(-1)
    out = torch.einsum("grhl,lgd->rghd", weights[..., :length], value_LGd)
    for ahead, value in enumerate(values):
        out = out + weights[..., length + ahead].transpose(0, 1)[..., None] * value[:, :, None]
    return out.flatten(1, 2)
