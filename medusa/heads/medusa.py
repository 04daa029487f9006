"""The heads of the Medusa paper (Cai et al. 2024, section 2.1.1, equation 1)."""

import torch
from torch import Tensor, nn

from medusa.heads.base import DraftHeads, HeadsConfig


class MedusaHeads(DraftHeads):
    """``features = x + SiLU(W x + b)`` per residual block, with W = 0 and b = 0 at the start.

    A fresh head therefore predicts exactly what the base predicts for the next token: the point from which training
    starts. The weights of all heads are stacked so that a decode step runs them as one batched product.

    Attributes:
        weight: [L, K, D, D] residual projections, [out, in] as in ``nn.Linear``.
        bias: [L, K, D].
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        layers, heads, dim = config.num_layers, config.num_heads, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(layers, heads, dim, dim))
        self.bias = nn.Parameter(torch.zeros(layers, heads, dim))
        self.lm_heads = nn.Parameter(torch.zeros(heads, config.vocab_size, dim)) if config.own_lm_heads else None

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Features [K, M, D] for hidden states [M, D]."""
        x_KMD = hidden_MD.expand(self.config.num_heads, *hidden_MD.shape)
        for weight_KDD, bias_KD in zip(self.weight, self.bias, strict=True):
            x_KMD = x_KMD + nn.functional.silu(torch.baddbmm(bias_KD[:, None], x_KMD, weight_KDD.transpose(1, 2)))
        return x_KMD
