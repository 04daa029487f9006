"""Recurrent heads: one small network, applied once per level of the tree, that reads the drafted tokens.

Medusa heads guess token t + 1 + k without knowing tokens t + 1 .. t + k. Hydra heads (Ankner et al. 2024) read the
embeddings of these tokens. Recurrent heads read one embedding per level, pass a state down the tree, and share their
weights (as in ReDrafter, Zhang et al. 2024). K heads need the memory of one, which stays in the processor's cache.
"""

import torch
from torch import Tensor, nn

from medusa.cache import Cached
from medusa.cpu.packed import Packed
from medusa.cpu.recurrent import RecurrentWeights
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary
from medusa.heads.blocks import ResidualBlock, of_parents, unit_embeddings

EXPANSION = 2
"""Inner width of a block / D."""


class RecurrentHeads(DraftHeads):
    """``s_k = s_{k-1} + O SiLU(W [s_{k-1}; e_k] + b)`` in one or more blocks; s_0 is the base's hidden state.

    e_k is the base's embedding, at unit scale, of the k-th token after the hidden state: the root for head 1, then
    drafted tokens. A vocabulary matrix reads s_k. O = 0 at the start, so fresh heads predict what the base predicts.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        dim = config.hidden_size
        self.blocks = nn.ModuleList(ResidualBlock(dim, dim, EXPANSION * dim) for _ in range(config.num_layers))

    def join(self, vocabulary: Vocabulary) -> None:
        """See ``DraftHeads.join``; on a CPU a draft becomes one C++ call if the base has plain matrices."""
        super().join(vocabulary)
        if self.lm_heads is not None or vocabulary.matrices is None:
            return
        ends = vocabulary.matrices
        weight, bias = ends.weight, ends.bias
        fusion = None if self.fusion is None else self.fusion.weight
        if not RecurrentWeights.fits([ends.embeddings, weight], bias, fusion, *self.blocks.parameters()):
            return
        ids = torch.arange(self.config.output_size) if self.draft_ids is None else self.draft_ids
        if self.draft_ids is not None:
            weight = weight.rows(ids) if isinstance(weight, Packed) else weight[ids]
            bias = None if bias is None else bias[ids]
        elif isinstance(weight, Packed):
            weight = weight.for_here()  # states of heads are not rounded to 8 bits
        self.native = RecurrentWeights(self.blocks, fusion, ends._replace(weight=weight, bias=bias), ids)

    def forward(self, hidden_MF: Tensor, path_MK: Tensor, vocabulary: Vocabulary, *_: Tensor | None) -> Tensor:
        """Features [K, M, D] on the given path."""
        states, state_MD = [], self.fuse(hidden_MF)
        for tokens_M in path_MK.unbind(1):
            state_MD = self._advance(state_MD, tokens_M, vocabulary)
            states.append(state_MD)
        return torch.stack(states)

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Tensor:
        """State [B, 1, D]."""
        return self.fuse(hidden_BF)[:, None]

    def level(
        self, head: int, state: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] and states [B, m, D] of the level's nodes."""
        state_BmD = self._advance(of_parents(state, parents_Bm), tokens_Bm, vocabulary)
        return self.head_logits(head, state_BmD, vocabulary), state_BmD

    def _advance(self, state: Tensor, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
        embeddings = unit_embeddings(tokens, vocabulary, state.dtype)
        for block in self.blocks:
            state = block(state, embeddings)
        return state
