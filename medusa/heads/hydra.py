"""Hydra heads (Ankner et al. 2024, section 3): each reads all tokens between the hidden state and what it predicts."""

import torch
from torch import Tensor, nn

from medusa.cache import Cached
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary
from medusa.heads.blocks import ResidualBlock, of_parents, unit_embeddings


class HydraHeads(DraftHeads):
    """``f_k = x + O_k SiLU(W_k [x; e_1; ..; e_k] + b_k)`` in one or more blocks; x starts as the base's hidden state.

    e_j is the base's embedding, at unit scale, of the j-th token after the hidden state: the root, then drafted
    tokens. Every head has its own weights, and a later head reads more tokens. O = 0 at the start, so fresh heads
    predict what the base predicts.

    Attributes:
        blocks: The blocks of each head.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        dim, layers = config.hidden_size, range(config.num_layers)
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResidualBlock(dim, (head + 1) * dim, dim) for _ in layers) for head in range(config.num_heads)
        )

    def forward(self, hidden_MF: Tensor, path_MK: Tensor, vocabulary: Vocabulary, *_: Tensor | None) -> Tensor:
        """Features [K, M, D] on the given path."""
        hidden_MD = self.fuse(hidden_MF)
        embeddings_ME = unit_embeddings(path_MK, vocabulary, hidden_MD.dtype).flatten(1)
        read = [embeddings_ME[:, : (head + 1) * hidden_MD.shape[1]] for head in range(self.config.num_heads)]
        return torch.stack([self._features(head, hidden_MD, read_ME) for head, read_ME in enumerate(read)])

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Tensor:
        """State [B, 1, D], the input of a head: at first only the hidden state."""
        return self.fuse(hidden_BF)[:, None]

    def level(
        self, head: int, state: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] of the level's nodes, and their inputs [B, m, D + k D] for head k."""
        embeddings_BmD = unit_embeddings(tokens_Bm, vocabulary, state.dtype)
        state = torch.cat([of_parents(state, parents_Bm), embeddings_BmD], dim=-1)
        dim = embeddings_BmD.shape[-1]
        return self.head_logits(head, self._features(head, state[..., :dim], state[..., dim:]), vocabulary), state

    def _features(self, head: int, x: Tensor, embeddings: Tensor) -> Tensor:
        for block in self.blocks[head]:  # type: ignore[attr-defined]
            x = block(x, embeddings)
        return x
