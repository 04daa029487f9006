"""The heads of the Medusa paper (Cai et al. 2024, section 2.1.1, equation 1), optionally told the newest token."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from medusa.heads.base import DraftHeads, HeadsConfig
from medusa.packed import LinearFunction, packed_linear


class MedusaHeads(DraftHeads):
    """``features = x + SiLU(W x + b)`` per residual block, with W = 0 and b = 0 at the start.

    A fresh head therefore predicts exactly what the base predicts for the next token: the point from which training
    starts. The weights of all heads are stacked so that a decode step runs them as one batched product.

    The paper's heads guess past token t + 1 without knowing it, although it is the tree's root and known. With
    ``sees_root`` the first block is ``SiLU(W x + U e + b)`` with e the embedding of that token at unit scale (Hydra's
    idea, Ankner et al. 2024, for the one token that costs nothing to know).

    Attributes:
        weight: [L, K, D, D] residual projections W, [out, in] as in ``nn.Linear``.
        bias: [L, K, D].
        root_weight: [K, D, D] projections U, or None.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        layers, heads, dim = config.num_layers, config.num_heads, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(layers, heads, dim, dim))
        self.bias = nn.Parameter(torch.zeros(layers, heads, dim))
        self.root_weight = nn.Parameter(torch.zeros(heads, dim, dim)) if config.sees_root else None
        self._frozen: tuple[LinearFunction, LinearFunction | None] | None = None
        self.lm_heads = nn.Parameter(torch.zeros(heads, config.vocab_size, dim)) if config.own_lm_heads else None

    def freeze(self) -> None:
        """Pack the first block's weights for the CPU's matrix kernels."""
        self._frozen = self._first_block(packed_linear)

    def _first_block(self, linear: Callable[..., LinearFunction]) -> tuple[LinearFunction, LinearFunction | None]:
        """The projections of hidden state and root: all heads read the same vectors, so one product serves them all."""
        first = linear(self.weight[0].flatten(0, 1), self.bias[0].flatten())
        return first, None if self.root_weight is None else linear(self.root_weight.flatten(0, 1))

    def forward(self, hidden_MD: Tensor, root_MD: Tensor) -> Tensor:
        """Features [K, M, D] for hidden states and root embeddings [M, D]."""
        silu = nn.functional.silu
        first, from_root = self._frozen or self._first_block(_plain_linear)
        inner_MF = first(hidden_MD)
        if from_root is not None:
            inner_MF = inner_MF + from_root(nn.functional.rms_norm(root_MD, root_MD.shape[-1:]))
        x_KMD: Tensor = hidden_MD + silu(inner_MF).unflatten(1, (self.config.num_heads, -1)).transpose(0, 1)
        for weight_KDD, bias_KD in zip(self.weight[1:], self.bias[1:], strict=True):
            x_KMD = x_KMD + silu(torch.baddbmm(bias_KD[:, None], x_KMD, weight_KDD.transpose(1, 2)))
        return x_KMD


def _plain_linear(weight: Tensor, bias: Tensor | None = None) -> LinearFunction:
    """``packed_linear`` without packing: gradients reach the weights."""
    return partial(nn.functional.linear, weight=weight, bias=bias)
