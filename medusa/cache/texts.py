"""Cached texts of layers with their own cache, for passes that continue them: lengths on the host, or on the device."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from medusa.attention.contract import BlockTable, TreeAttention, TreePlan
from medusa.cache.pool import BlockPool
from medusa.cache.sequence import CachedSequence, plan_pass
from medusa.tree import Draft


class Texts(Protocol):
    """The cached texts of a layer."""

    @property
    def pool(self) -> BlockPool:
        """The pool of their blocks."""

    def plan(self, draft: Draft, attention: TreeAttention, ahead: int = 0, computed: int = 0) -> TreePlan:
        """The plan of a pass over a tree behind each text.

        Args:
            draft: The trees.
            attention: The attention backend.
            ahead: Offset of the roots from the first position that is not cached; -1 = the last cached position.
            computed: See ``TreePlan``.
        """


class HostTexts(NamedTuple):
    """Texts as sequences of the layer; blocks for a pass are reserved when it is planned."""

    sequences: Sequence[CachedSequence]

    @property
    def pool(self) -> BlockPool:
        """See ``Texts``, here and below."""
        return self.sequences[0].pool

    def plan(self, draft: Draft, attention: TreeAttention, ahead: int = 0, computed: int = 0) -> TreePlan:
        """See ``Texts``; uses the lengths on the host."""
        return plan_pass([(draft, self.sequences)], attention, ahead=ahead, computed=computed)


class FixedTexts(NamedTuple):
    """Texts of a step with fixed shapes: lengths are on the device only, and blocks were reserved before.

    Attributes:
        pool: See ``Texts``.
        table: Lines of the texts; inert requests have line 0.
        lengths: [B] int64 number of cached positions.
        kv_length: Larger than all positions that a pass can reach.
    """

    pool: BlockPool
    table: BlockTable
    lengths: Tensor
    kv_length: int

    def plan(self, draft: Draft, attention: TreeAttention, ahead: int = 0, computed: int = 0) -> TreePlan:
        """See ``Texts``; uses the lengths on the device, which are 0 for inert requests."""
        lengths_B = (self.lengths + ahead).clamp(min=0) if ahead else self.lengths
        return TreePlan([draft], lengths_B, self.kv_length, self.table, attention, computed=computed)
