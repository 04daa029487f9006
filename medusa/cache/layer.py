"""What transformers' layers write to and read from: one layer's keys and values."""

import weakref
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class PerDevice:
    """A small tensor, copied once to each device that asks for it: the layers of a base may be spread over several."""

    def __init__(self, tensor: Tensor) -> None:
        self._copies = {tensor.device: tensor}
        self._tensor = tensor

    def on(self, device: torch.device) -> Tensor:
        """The tensor on ``device``."""
        if device not in self._copies:
            self._copies[device] = self._tensor.to(device)
        return self._copies[device]


class Owner(Protocol):
    """What a layer asks its cache, see ``SlotCache``."""

    slots: int
    capacity: int
    kv_length: int
    nodes: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of buffers, see ``Rows``."""

    @property
    def write_rows(self) -> PerDevice:
        """Where this step writes."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, capacity, Hkv, D] (the layout that flash-attn reads).

    Allocated at the first write, when the layer's head sizes and its device are known.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, cache: Owner) -> None:
        super().__init__()
        # Not the cache itself: a cycle would keep all rows until Python looks for cycles.
        self.cache = cast(Owner, weakref.proxy(cache))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for key and value states [B, Hkv, N, D]."""
        rows = self.cache.shape
        self.keys = key_states.new_zeros(*rows, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(*rows, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the rows of this step, [B, Hkv, N, D], and return what attention reads, see ``seen``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write_rows, views = self.cache.write_rows.on(key_states.device), []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None, "allocated"
            rows = states.transpose(1, 2).flatten(0, 1)
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, write_rows, rows)
            views.append(self.seen(buffer, len(states)))
        return views[0], views[1]

    def seen(self, buffer: Tensor, batch: int) -> Tensor:
        """View [B, Hkv, kv_length, D] of all rows of the first slots."""
        return buffer[:batch, : self.cache.kv_length].transpose(1, 2)

    def resize(self, capacity: int, kept: int) -> None:
        """Move the first ``kept`` rows of each slot to buffers of ``capacity`` rows, where they are smaller."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[1] < capacity:
                new = old.new_zeros(len(old), capacity, *old.shape[2:])
                new[:, :kept] = old[:, :kept]
                setattr(self, name, new)

    def take(self, other: "SlotLayer", first: int, kept: int) -> bool:
        """Copy the first ``kept`` rows of each of the other's slots into the slots from ``first`` on.

        Returns:
            Whether the buffers are new ones: there was no room for so many slots.
        """
        if not self.is_initialized and not other.is_initialized:
            return False
        end, moved = first + other.cache.slots, not self.is_initialized
        if not self.is_initialized:
            assert other.keys is not None and other.values is not None, "one of them is"
            self.lazy_initialization(other.keys.transpose(1, 2), other.values.transpose(1, 2))
        for name in ("keys", "values"):
            ours = getattr(self, name)
            if len(ours) < end:
                ours = torch.cat([ours, ours.new_zeros(max(end, 2 * len(ours)) - len(ours), *ours.shape[1:])])
                setattr(self, name, ours)
                moved = True
            if other.is_initialized:
                ours[first:end, :kept] = getattr(other, name)[: end - first, :kept]
        return moved

    def move(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[target, :rows] = buffer[source, :rows]

    def get_seq_length(self) -> int:
        """Rows that attention sees of each slot before those of this step."""
        return self.cache.kv_length - self.cache.nodes

    def get_max_length(self) -> int:
        """Rows per slot."""
        return self.cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key rows that attention sees, and the offset of the first."""
        return self.cache.kv_length, 0
