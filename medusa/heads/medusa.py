"""The heads of the Medusa paper (Cai et al. 2024, section 2.1.1, equation 1)."""

import torch
from torch import Tensor, nn

from medusa.cache import Cached
from medusa.cpu.native import LinearFunction, native_linear
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary


class MedusaHeads(DraftHeads):
    """``features = x + SiLU(W x + b)`` per residual block, with W = 0 and b = 0 at the start.

    So a fresh head predicts exactly what the base predicts for the next token, and training starts from there. Heads do
    not see what other heads drafted, so one pass gives the logits of all levels; the weights of all heads are stacked
    for it.

    Attributes:
        weight: [L, K, D, D] residual projections W, [out, in] as in ``nn.Linear``.
        bias: [L, K, D].
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        layers, heads, dim = config.num_layers, config.num_heads, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(layers, heads, dim, dim))
        self.bias = nn.Parameter(torch.zeros(layers, heads, dim))
        self._joined_blocks: LinearFunction | None = None  # of frozen heads, see ``join``

    def join(self, vocabulary: Vocabulary) -> None:
        """See ``DraftHeads.join``; the first blocks of all heads become one layer."""
        super().join(vocabulary)
        self._joined_blocks = native_linear(self.weight[0].flatten(0, 1), self.bias[0].flatten())

    def forward(self, hidden_MF: Tensor, path_MK: Tensor, vocabulary: Vocabulary, *_: Tensor | None) -> Tensor:
        """Features [K, M, D]; the tokens are not read."""
        return self._features(self.fuse(hidden_MF))

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Tensor:
        """Logits of all levels [K, B, V]."""
        features_KBD = self._features(self.fuse(hidden_BF), self._joined_blocks)
        if self.lm_heads is None:
            return self.head_logits(0, features_KBD, vocabulary)  # one layer for all
        return torch.bmm(features_KBD, self.lm_heads.transpose(1, 2))

    def level(
        self, head: int, state: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, 1, V]: the same below every node of the level."""
        return state[head][:, None], state

    def _features(self, hidden_MD: Tensor, first: LinearFunction | None = None) -> Tensor:
        silu, linear = nn.functional.silu, nn.functional.linear
        first = first or (lambda x: linear(x, self.weight[0].flatten(0, 1), self.bias[0].flatten()))
        inner_MF = first(hidden_MD)
        x_KMD: Tensor = hidden_MD + silu(inner_MF).unflatten(1, (self.config.num_heads, -1)).transpose(0, 1)
        for weight_KDD, bias_KD in zip(self.weight[1:], self.bias[1:], strict=True):
            x_KMD = x_KMD + silu(torch.baddbmm(bias_KD[:, None], x_KMD, weight_KDD.transpose(1, 2)))
        return x_KMD
