"""Medusa heads with a correction by the token drafted just before (as in DSpark): cheap, and one token of sight."""

import math

import torch
from torch import Tensor, nn

from medusa.heads.base import HeadsConfig, Vocabulary
from medusa.heads.blocks import unit_embeddings
from medusa.heads.medusa import MedusaHeads


class MarkovHeads(MedusaHeads):
    """``f_k = m_k + Q_k P_k e_k`` with m_k the features of Medusa head k, Q = 0 at the start.

    e_k is the base's embedding, at unit scale, of the k-th token after the hidden state, the last one before the token
    that head k predicts. Behind the base's output layer W this adds the low-rank term ``(W Q_k) (P_k e_k)`` to the
    logits: both ends are the base's, and nothing of the size of the vocabulary is trained.

    Attributes:
        down: [K, R, D] P, with R = ``config.rank``.
        up: [K, D, R] Q.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        heads, dim, rank = config.num_heads, config.hidden_size, config.rank
        self.down = nn.Parameter(torch.empty(heads, rank, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.up = nn.Parameter(torch.zeros(heads, dim, rank))

    def forward(self, hidden_MF: Tensor, path_MK: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Features [K, M, D] on the given path."""
        hidden_MD = self.fuse(hidden_MF)
        embeddings_KMD = unit_embeddings(path_MK.T, vocabulary, hidden_MD.dtype)
        low_KMR = torch.bmm(embeddings_KMD, self.down.transpose(1, 2))
        return self._features(hidden_MD) + torch.bmm(low_KMR, self.up.transpose(1, 2))

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Features of the Medusa heads of all levels [K, B, D]."""
        return self._features(self.fuse(hidden_BF))

    def level(
        self, head: int, state: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] of the level's nodes; the state stays."""
        linear, embeddings_BmD = nn.functional.linear, unit_embeddings(tokens_Bm, vocabulary, state.dtype)
        correction_BmD = linear(linear(embeddings_BmD, self.down[head]), self.up[head])
        return self.head_logits(head, state[head][:, None] + correction_BmD, vocabulary), state
