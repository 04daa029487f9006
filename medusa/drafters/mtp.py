"""Drafting with the multi-token-prediction layer of the base, again and again from its own output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from medusa.base.model import BaseModel
from medusa.base.mtp import MtpRows
from medusa.cache import SlotCache
from medusa.state import DecodeState


class MtpWriter:
    """The layer, as a ``Writer``: its rows follow the base's step by step (``MtpRows``).

    Args:
        base: With its layer (``BaseModel.with_mtp``).
    """

    def __init__(self, base: BaseModel) -> None:
        assert base.mtp is not None, "checked by the caller"
        self._base, self._layer = base, base.mtp
        self.context_length, self.device = base.context_length, base.device

    @contextmanager
    def reading(
        self, state: DecodeState, cache: SlotCache, drafting: Sequence[bool]
    ) -> Iterator[tuple[SlotCache, Tensor]]:
        """See ``Writer``; all was computed when it was committed."""
        own = cache.followers[self._layer]
        assert isinstance(own, MtpRows), "made with the cache"
        hidden_BD = own.hidden
        try:
            yield own, hidden_BD
        finally:
            own.hidden = hidden_BD

    def write(self, own: SlotCache, tokens_B1: Tensor, counts: Sequence[int], hidden_BD: Tensor) -> Tensor:
        """See ``Writer``."""
        assert isinstance(own, MtpRows), "as read"
        self._layer.extend(own, hidden_BD[:, None], tokens_B1, counts)
        return own.hidden

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See ``Writer``."""
        return self._base.logits(hidden_BD)
