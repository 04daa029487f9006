"""Texts that layers with a cache of their own have read, for passes behind them: in numbers of the host, or fixed."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from medusa.attention.contract import BlockTable, TreeAttention, TreePlan
from medusa.cache.pool import BlockPool
from medusa.cache.sequence import CachedSequence, plan_pass
from medusa.tree import Draft


class Texts(Protocol):
    """What a layer has cached of some texts."""

    @property
    def pool(self) -> BlockPool:
        """Whose blocks they are."""

    def plan(self, draft: Draft, attention: TreeAttention, ahead: int = 0, computed: int = 0) -> TreePlan:
        """The plan of a pass over a tree behind each text.

        Args:
            draft: The trees.
            attention: Who computes.
            ahead: Where the roots stand, from the first position that is not cached on; -1 = at the last one.
            computed: See ``TreePlan``.
        """


class HostTexts(NamedTuple):
    """Texts of the layer's own sequences; blocks for a pass are taken when it is planned."""

    sequences: Sequence[CachedSequence]

    @property
    def pool(self) -> BlockPool:
        """See ``Texts``, here and below."""
        return self.sequences[0].pool

    def plan(self, draft: Draft, attention: TreeAttention, ahead: int = 0, computed: int = 0) -> TreePlan:
        """By the sequences' lengths."""
        return plan_pass([(draft, self.sequences)], attention, ahead=ahead, computed=computed)


class FixedTexts(NamedTuple):
    """Texts of a step whose shapes are fixed: lengths are on the device alone, and blocks have been taken before.

    Attributes:
        pool: See ``Texts``.
        table: Lines of the texts; those of inert requests lead to the block that is nobody's.
        lengths: [B] int64 positions that are cached.
        kv_length: Above all positions that a pass can reach.
    """

    pool: BlockPool
    table: BlockTable
    lengths: Tensor
    kv_length: int

    def plan(self, draft: Draft, attention: TreeAttention, ahead: int = 0, computed: int = 0) -> TreePlan:
        """By the device's lengths; inert requests have none."""
        lengths_B = (self.lengths + ahead).clamp(min=0) if ahead else self.lengths
        return TreePlan([draft], lengths_B, self.kv_length, self.table, attention, computed=computed)
