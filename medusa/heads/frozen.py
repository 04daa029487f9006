"""Heads prepared to draft: their weights, and those of the base, do not change any more."""

from functools import partial

from medusa.cpu.packed import PackedLinear, replace_linears
from medusa.heads.base import DraftHeads, Vocabulary


def freeze(heads: DraftHeads, vocabulary: Vocabulary) -> DraftHeads:
    """A copy of the heads that drafts faster and computes the same; it shares their memory, and they stay as they are.

    On a CPU linear layers are packed for its matrix kernels, beside their plain weights, which can still be saved.

    Args:
        heads: On the base's device and in its dtype.
        vocabulary: Both ends of that base.
    """
    frozen = heads.with_config().eval().requires_grad_(False)
    replace_linears(frozen, partial(PackedLinear, keep_weight=True))
    frozen.join(vocabulary)
    return frozen
