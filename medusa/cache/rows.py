"""Where the rows of a cache's sequences stand: the contract, and side by side in buffers of its own."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa.attention.contract import BlockTable
from medusa.cache.layer import Owner, SlotLayer


class Rows(Protocol):
    """The rows of a cache's sequences, all layers.

    Attributes:
        layers: One per layer of the base; their buffers are [*shape, Hkv, D].
        shape: Of the buffers: slots and rows of each, or blocks and rows of each.
    """

    layers: list[SlotLayer]

    @property
    def shape(self) -> tuple[int, int]:
        """See above."""

    @property
    def table(self) -> BlockTable | None:
        """Where rows stand that are in blocks, for the attention; None where they stand side by side."""

    def widen(self, capacity: int, kept: int) -> None:
        """Make it possible that a slot has ``capacity`` rows, ``kept`` of which hold something now."""

    def prepare(self, lengths: Sequence[int]) -> None:
        """Have memory for so many rows of the first slots."""

    def places(self, positions_BN: Tensor) -> Tensor:
        """[B, N] rows of the flattened buffers, of these positions of the first slots."""

    def join(self, other: "Rows", slots: int, theirs: int, kept: int) -> bool:
        """Add the first ``kept`` rows of the other's slots behind ours; returns whether our buffers have moved."""

    def select(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep these slots alone, see ``SlotCache.select``; lengths are those of all slots."""

    def cut(self, lengths: Sequence[int]) -> bool:
        """There are so many slots with so many rows from now on; returns whether our buffers have moved."""

    def recall(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Begin each slot with known rows of the beginning of its text; returns how many these are."""

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Let others find a slot's rows; these are its first tokens."""


class SlotRows:
    """``capacity`` rows for every slot, one slot behind the other.

    Buffers stay where they are until they are full; then ``widen`` copies what they hold to larger ones, and so does
    ``join``.
    """

    table = None

    def __init__(self, cache: Owner, num_layers: int, device: torch.device) -> None:
        self.layers = [SlotLayer(cache) for _ in range(num_layers)]
        self._device = device
        self._number(cache.slots, cache.capacity)

    @property
    def shape(self) -> tuple[int, int]:
        """See ``Rows``, here and below."""
        return len(self._first_rows), self._capacity

    def widen(self, capacity: int, kept: int) -> None:
        """Copies what is kept."""
        for layer in self.layers:
            layer.resize(capacity, kept)
        self._number(len(self._first_rows), capacity)

    def prepare(self, lengths: Sequence[int]) -> None:
        """It is there."""

    def places(self, positions_BN: Tensor) -> Tensor:
        """By multiplication. Always from the same memory as long as buffers do not move: graphs read it."""
        return self._first_rows[: len(positions_BN), None] + positions_BN

    def join(self, other: Rows, slots: int, theirs: int, kept: int) -> bool:
        """Copies the other's rows."""
        pairs = zip(self.layers, other.layers, strict=True)
        moved = [ours.take(layer, slots, kept) for ours, layer in pairs]
        return self._fit(slots + theirs) or any(moved)

    def select(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Copies rows of slots that change places; the buffers stay, so that who joins next needs no new memory."""
        for place, slot in enumerate(slots):
            if slot != place:
                for layer in self.layers:
                    layer.move(slot, place, lengths[slot])

    def cut(self, lengths: Sequence[int]) -> bool:
        """Nothing moves but where there are more slots than ever."""
        return self._fit(len(lengths))

    def recall(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """None: other caches' rows are their own."""
        return [0] * len(texts)

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Nobody will ask."""

    def _fit(self, slots: int) -> bool:
        if slots <= len(self._first_rows):
            return False
        self._number(slots, self._capacity)
        return True

    def _number(self, slots: int, capacity: int) -> None:
        """Say where so many slots begin."""
        self._capacity = capacity
        self._first_rows = torch.arange(slots, device=self._device) * capacity
