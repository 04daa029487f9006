"""Sequential heads: head k knows the tokens that the heads before it drafted (Hydra, Ankner et al. 2024, section 3).

Hydra feeds head k the embeddings of all drafted tokens at once. Here they arrive one per level in a state that is
handed down the tree (as in ReDrafter, Zhang et al. 2024): the same knowledge, and every level costs the same.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from medusa import packed
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary

EXPANSION = 2
"""Inner width of a block / D."""


class HydraHeads(DraftHeads):
    """``s_k = s_{k-1} + O_k SiLU(W_k [s_{k-1}; e_k] + b_k)``, one or more such blocks per head; s_0 = hidden state.

    e_k is the base's embedding, at unit scale, of the k-th token after the hidden state: the root for head 1, then
    drafted tokens. A vocabulary matrix reads s_k. O = 0 at the start: a fresh head predicts what the base predicts.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        dim, layers = config.hidden_size, range(config.num_layers)
        self.blocks = nn.ModuleList(nn.ModuleList(_Block(dim) for _ in layers) for _ in range(config.num_heads))

    def freeze(self) -> None:
        """Pack the weights for the CPU's matrix kernels."""
        packed.pack_linears(self, keep=list(self.modules()))  # a save reads the plain weights

    def forward(self, hidden_MD: Tensor, path_MK: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Features [K, M, D] on the given path."""
        states, state_MD = [], hidden_MD
        for head in range(self.config.num_heads):
            state_MD = self._advance(head, state_MD, vocabulary.embed(path_MK[:, head]))
            states.append(state_MD)
        return torch.stack(states)

    def begin(self, hidden_BD: Tensor, vocabulary: Vocabulary) -> Tensor:
        """State [B, 1, D]."""
        return hidden_BD[:, None]

    def level(
        self, head: int, state: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] and states [B, m, D] of the level's nodes."""
        before_BmD = state.gather(1, parents_Bm[..., None].expand(-1, -1, state.shape[-1]))
        state_BmD = self._advance(head, before_BmD, vocabulary.embed(tokens_Bm))
        return self.head_logits(head, state_BmD, vocabulary), state_BmD

    def _advance(self, head: int, state: Tensor, embedding: Tensor) -> Tensor:
        embedding = nn.functional.rms_norm(embedding.to(state.dtype), embedding.shape[-1:])
        blocks: Iterable[nn.Module] = self.blocks[head]  # type: ignore[assignment]
        for block in blocks:
            state = block(state, embedding)
        return state


class _Block(nn.Module):
    """``x + O SiLU(W [x; e] + b)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * dim, EXPANSION * dim)
        self.outer = nn.Linear(EXPANSION * dim, dim, bias=False)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        out: Tensor = x + self.outer(nn.functional.silu(self.inner(torch.cat([x, embedding], dim=-1))))
        return out
