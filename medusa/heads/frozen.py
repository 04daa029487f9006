"""Preparation of heads for drafting: their weights, and those of the base, are frozen."""

from collections.abc import Sequence

import torch

from medusa.cpu.native import use_kernels
from medusa.heads.base import DraftHeads, Vocabulary


def freeze(heads: DraftHeads, vocabulary: Vocabulary, layers: Sequence[int] = ()) -> DraftHeads:
    """A copy of the heads that drafts faster and computes the same; it shares their memory, and they are not changed.

    On a CPU our kernels compute the linear layers, for some processors with copies of the weights in 8 bits.

    Args:
        heads: Heads on the base's device and in its dtype.
        vocabulary: The base's embeddings and output layer.
        layers: All layers whose outputs are in the base's hidden states, including those that these heads read; empty =
            only these.
    """
    frozen = heads.with_config().eval().requires_grad_(False)
    own, size = heads.config.feature_layers, heads.config.hidden_size
    if layers and tuple(layers) != tuple(own):
        parts = [0, *(1 + list(layers).index(layer) for layer in own)]
        columns = [torch.arange(part * size, (part + 1) * size) for part in parts]
        frozen.reads = torch.cat(columns).to(next(frozen.parameters()).device)
    use_kernels(frozen)
    frozen.join(vocabulary)
    return frozen
