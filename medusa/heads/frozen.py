"""Heads prepared to draft: their weights, and those of the base, do not change any more."""

from medusa.cpu.native import use_kernels
from medusa.heads.base import DraftHeads, Vocabulary


def freeze(heads: DraftHeads, vocabulary: Vocabulary) -> DraftHeads:
    """A copy of the heads that drafts faster and computes the same; it shares their memory, and they stay as they are.

    On a CPU linear layers are computed by our kernel.

    Args:
        heads: On the base's device and in its dtype.
        vocabulary: Both ends of that base.
    """
    frozen = heads.with_config().eval().requires_grad_(False)
    use_kernels(frozen)
    frozen.join(vocabulary)
    return frozen
