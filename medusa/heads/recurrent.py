"""Heads that know what was drafted before them: one small network, applied once per level of the tree.

Medusa heads guess token t + 1 + k without knowing tokens t + 1 .. t + k. Hydra heads (Ankner et al. 2024) read their
embeddings; here they arrive one per level in a state that is handed down the tree, and all heads share their weights
(as in ReDrafter, Zhang et al. 2024). K heads cost the memory of one, which stays in the processor's cache.
"""

import torch
from torch import Tensor, nn

from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary
from medusa.packed import LinearFunction, packed_linear

EXPANSION = 2
"""Inner width of a block / D."""


class RecurrentHeads(DraftHeads):
    """``s_k = s_{k-1} + O SiLU(W [s_{k-1}; e_k] + b)``, one or more such blocks; s_0 is the base's hidden state.

    e_k is the base's embedding, at unit scale, of the k-th token after the hidden state: the root for head 1, then
    drafted tokens. A vocabulary matrix reads s_k. O = 0 at the start: fresh heads predict what the base predicts.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(_Block(config.hidden_size) for _ in range(config.num_layers))

    def freeze(self) -> None:
        """Pack the weights for the CPU's matrix kernels."""
        super().freeze()
        for block in self.modules():
            if isinstance(block, _Block):
                block.freeze()

    def forward(self, hidden_MF: Tensor, path_MK: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Features [K, M, D] on the given path."""
        states, state_MD = [], self.fuse(hidden_MF)
        for tokens_M in path_MK.unbind(1):
            state_MD = self._advance(state_MD, vocabulary.embed(tokens_M))
            states.append(state_MD)
        return torch.stack(states)

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary) -> Tensor:
        """State [B, 1, D]."""
        return self.fuse(hidden_BF)[:, None]

    def level(
        self, head: int, state: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] and states [B, m, D] of the level's nodes."""
        before_BmD = state.gather(1, parents_Bm[..., None].expand(-1, -1, state.shape[-1]))
        state_BmD = self._advance(before_BmD, vocabulary.embed(tokens_Bm))
        return self.head_logits(head, state_BmD, vocabulary), state_BmD

    def _advance(self, state: Tensor, embedding: Tensor) -> Tensor:
        embedding = nn.functional.rms_norm(embedding.to(state.dtype), embedding.shape[-1:])
        for block in self.blocks:
            state = block(state, embedding)
        return state


class _Block(nn.Module):
    """``x + O SiLU(W [x; e] + b)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * dim, EXPANSION * dim)
        self.outer = nn.Linear(EXPANSION * dim, dim, bias=False)
        nn.init.zeros_(self.outer.weight)
        self._frozen: tuple[LinearFunction, LinearFunction] | None = None

    def freeze(self) -> None:
        self._frozen = packed_linear(self.inner.weight, self.inner.bias), packed_linear(self.outer.weight)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        inner, outer = self._frozen or (self.inner, self.outer)
        out: Tensor = x + outer(nn.functional.silu(inner(torch.cat([x, embedding], dim=-1))))
        return out
