"""Medusa heads with a correction by the previous drafted token (as in DSpark): cheap, but it sees one token only."""

import math

import torch
from torch import Tensor, nn

from medusa.cache import Cached
from medusa.cpu.native import LinearFunction, native_linear
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary
from medusa.heads.blocks import unit_embeddings
from medusa.heads.medusa import MedusaHeads


class MarkovHeads(MedusaHeads):
    """``f_k = m_k + Q_k P_k e_k`` with m_k the features of Medusa head k, Q = 0 at the start.

    e_k is the base's embedding, at unit scale, of the k-th token after the hidden state: the last token before the one
    that head k predicts. After the base's output layer W this adds the low-rank term ``(W Q_k) (P_k e_k)`` to the
    logits. Embeddings and output layer are the base's, so nothing of the vocabulary's size is trained. For decoding
    W Q_k is computed once, so a step reads W once for all levels, as with Medusa heads. If the base caps its logits,
    they cannot be added, and every level reads W.

    Attributes:
        down: [K, R, D] P, with R = ``config.rank``.
        up: [K, D, R] Q.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        heads, dim, rank = config.num_heads, config.hidden_size, config.rank
        self.down = nn.Parameter(torch.empty(heads, rank, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.up = nn.Parameter(torch.zeros(heads, dim, rank))
        self._low_rank: list[tuple[LinearFunction, LinearFunction]] = []  # P_k and W Q_k of frozen heads

    def join(self, vocabulary: Vocabulary) -> None:
        """See ``DraftHeads.join``; also computes W Q_k."""
        super().join(vocabulary)
        if self.lm_heads is not None or vocabulary.linear:
            raised = [behind_output(self, up_DR, vocabulary, head) for head, up_DR in enumerate(self.up)]
            self._low_rank = [(native_linear(p), native_linear(wq)) for p, wq in zip(self.down, raised, strict=True)]

    def forward(self, hidden_MF: Tensor, path_MK: Tensor, vocabulary: Vocabulary, *_: Tensor | None) -> Tensor:
        """Features [K, M, D] on the given path."""
        hidden_MD = self.fuse(hidden_MF)
        embeddings_KMD = unit_embeddings(path_MK.T, vocabulary, hidden_MD.dtype)
        low_KMR = torch.bmm(embeddings_KMD, self.down.transpose(1, 2))
        return self._features(hidden_MD) + torch.bmm(low_KMR, self.up.transpose(1, 2))

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Tensor:
        """Logits [K, B, V] of the Medusa heads if corrections can be added to logits, otherwise features [K, B, D]."""
        if self._low_rank:
            return super().begin(hidden_BF, vocabulary)
        return self._features(self.fuse(hidden_BF), self._joined_blocks)

    def level(
        self, head: int, state: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] of the level's nodes; the state does not change."""
        before, embeddings_BmD = state[head][:, None], unit_embeddings(tokens_Bm, vocabulary, self.down.dtype)
        if self._low_rank:
            down, raised = self._low_rank[head]
            return before + raised(down(embeddings_BmD)), state
        linear = nn.functional.linear
        features_BmD = before + linear(linear(embeddings_BmD, self.down[head]), self.up[head])
        return self.head_logits(head, features_BmD, vocabulary), state


@torch.no_grad()
def behind_output(heads: DraftHeads, up_DR: Tensor, vocabulary: Vocabulary, head: int = 0) -> Tensor:
    """W Q [V, R] for a correction Q of the features, where logits are a linear function W of the features."""
    columns_RD = up_DR.T
    bias_1V = heads.head_logits(head, torch.zeros_like(columns_RD[:1]), vocabulary)
    return (heads.head_logits(head, columns_RD, vocabulary) - bias_1V).T.to(up_DR.dtype).contiguous()
