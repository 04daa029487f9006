"""Common parts of head architectures.

Legend: B sequences, m tree nodes, D hidden size, S width of the state that a node passes to its children.
"""

import torch
from torch import Tensor, nn

from medusa.heads.base import Vocabulary


class ResidualBlock(nn.Module):
    """``x + O SiLU(W [x; more] + b)`` with O = 0 at the start, so a fresh block changes nothing.

    Args:
        dim: D, width of x.
        more: Width of the additional input.
        inner: Rows of W.
    """

    def __init__(self, dim: int, more: int, inner: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim + more, inner)
        self.outer = nn.Linear(inner, dim, bias=False)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        """The block's output, of the shape [..., D] of x."""
        out: Tensor = x + self.outer(nn.functional.silu(self.inner(torch.cat([x, more], dim=-1))))
        return out


def unit_embeddings(tokens: Tensor, vocabulary: Vocabulary, dtype: torch.dtype) -> Tensor:
    """The base's input embeddings [..., D] of tokens [...] at unit scale; the scales of bases differ by far."""
    embeddings = vocabulary.embed(tokens).to(dtype)
    return nn.functional.rms_norm(embeddings, embeddings.shape[-1:])


def of_parents(state_BnS: Tensor, parents_Bm: Tensor) -> Tensor:
    """The state [B, m, S] of each node's parent, out of the states [B, n, S] of the previous level."""
    return state_BnS.gather(1, parents_Bm[..., None].expand(-1, -1, state_BnS.shape[-1]))
