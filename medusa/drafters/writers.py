"""Models that write drafts token by token: a smaller one, the first layers of the base, or a layer that it brings.

Legend: B batch, C tokens of a pass, D hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.base.mtp import MtpRows
from medusa.base.verify import verify
from medusa.cache import SlotCache
from medusa.state import DecodeState, latest
from medusa.tree import Draft

CHUNK = 512
"""Tokens of a text per pass, at most."""


class Writer(Protocol):
    """A model that goes on from the roots."""

    context_length: int
    device: torch.device

    @contextmanager
    def reading(
        self, state: DecodeState, cache: SlotCache, drafting: Sequence[bool]
    ) -> Iterator[tuple[SlotCache, Tensor]]:
        """Know the texts up to their roots; gives where rows go, and hidden states [B, D] at the roots.

        Args:
            state: Of the step.
            cache: The base's.
            drafting: Rows that are drafted for; nothing is computed for the others.
        """

    def write(self, own: SlotCache, tokens_B1: Tensor, counts: Sequence[int], hidden_BD: Tensor) -> Tensor:
        """Compute a token more of the rows whose count is 1; their hidden states, and the old ones of the others."""

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """[B, V'] of the next tokens; V' may differ from the base's by padding."""


class SmallModel:
    """A smaller model. Its cache follows the base's: what was accepted is computed together with the root.

    Args:
        model: Prepared for decoding, with the base's tokens.
    """

    def __init__(self, model: BaseModel) -> None:
        self._model, self.context_length, self.device = model, model.context_length, model.device

    @contextmanager
    def reading(
        self, state: DecodeState, cache: SlotCache, drafting: Sequence[bool]
    ) -> Iterator[tuple[SlotCache, Tensor]]:
        """See ``Writer``."""
        own = cache.follower(self._model, self._model.new_cache)
        if any(have > rows for have, rows in zip(own.host_lengths, cache.host_lengths, strict=True)):
            # A step was given up.
            own.cut([min(pair) for pair in zip(own.host_lengths, cache.host_lengths, strict=True)])
        missing = zip(drafting, cache.host_lengths, own.host_lengths, strict=True)
        yield own, self._read(state, own, [on * (rows + 1 - have) for on, rows, have in missing])

    def _read(self, state: DecodeState, own: SlotCache, missing: list[int]) -> Tensor:
        """Compute what stands in the texts since the last draft, up to their roots; the last hidden states."""
        model = self._model
        hidden_BD = torch.zeros(len(missing), model.hidden_size, device=model.device, dtype=model.dtype)
        while any(missing):
            counts = [min(rows, CHUNK) for rows in missing]
            index_C = torch.arange(max(counts), device=state.history.device)
            places_BC = (own.lengths[:, None] + index_C).clamp(max=state.history.shape[1] - 1)
            hidden_BD = self.write(own, state.history.gather(1, places_BC), counts, hidden_BD)
            missing = [rows - count for rows, count in zip(missing, counts, strict=True)]
        return hidden_BD

    def write(self, own: SlotCache, tokens_BC: Tensor, counts: Sequence[int], hidden_BD: Tensor) -> Tensor:
        """See ``Writer``; several tokens of a row at a time too."""
        known_BC = tokens_BC.clamp(max=self._model.vocab_size - 1)
        hidden_BCD = verify(self._model, own, Draft.chain(known_BC, counts))
        counts_B = torch.tensor(counts, device=tokens_BC.device)
        own.extend(counts_B)
        own.grow(counts)
        return latest(hidden_BCD, counts_B, hidden_BD)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See ``Writer``."""
        return self._model.logits(hidden_BD)


class FirstLayers(SmallModel):
    """The base's own first layers (``BaseModel.shallow``): their rows of the base's cache are its own."""

    @contextmanager
    def reading(
        self, state: DecodeState, cache: SlotCache, drafting: Sequence[bool]
    ) -> Iterator[tuple[SlotCache, Tensor]]:
        """See ``Writer``."""
        with cache.provisional():
            yield cache, self._read(state, cache, [int(on) for on in drafting])


class MtpWriter:
    """The base's multi-token-prediction layer, again and again from its own output; see ``medusa.base.mtp``.

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
        own = cache.follower(self._layer, lambda slots: self._layer.new_rows(slots, cache.capacity))
        assert isinstance(own, MtpRows), "of the layer"
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
