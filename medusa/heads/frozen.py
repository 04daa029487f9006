"""Heads prepared to draft: their weights, and those of the base, do not change any more."""

from collections.abc import Sequence

import torch

from medusa.cpu.native import use_kernels
from medusa.heads.base import DraftHeads, Vocabulary


def freeze(heads: DraftHeads, vocabulary: Vocabulary, layers: Sequence[int] = ()) -> DraftHeads:
    """A copy of the heads that drafts faster and computes the same; it shares their memory, and they stay as they are.

    On a CPU linear layers are computed by our kernel.

    Args:
        heads: On the base's device and in its dtype.
        vocabulary: Both ends of that base.
        layers: Layers whose outputs stand in the base's hidden states, those that these heads read among them; none =
            these alone.
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
