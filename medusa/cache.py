"""The KV cache: rows per sequence slot; a step writes its tree rows behind them and keeps the accepted ones."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa.cpu import native


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


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, capacity, Hkv, D] (the layout that flash-attn reads).

    Allocated at the first write, when the layer's head sizes and its device are known.
    """

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        # Not the cache itself: a cycle would keep all rows until Python looks for cycles.
        self.cache = cast(SlotCache, weakref.proxy(cache))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for key and value states [B, Hkv, N, D]."""
        rows = (self.cache.numbered, self.cache.capacity)
        self.keys = key_states.new_zeros(*rows, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(*rows, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the rows of this step, [B, Hkv, N, D], and return views [B, Hkv, kv_length, D] of all rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write_rows, views = self.cache.write_rows.on(key_states.device), []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            rows = states.transpose(1, 2).flatten(0, 1)
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, write_rows, rows)
            views.append(buffer[: len(states), : self.cache.kv_length].transpose(1, 2))
        return views[0], views[1]

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


class SlotCache(Cache):
    """Keys and values of ``slots`` sequences of different lengths.

    The order of a step: ``begin`` (where the tree rows go), the base's forward pass (which writes them), ``commit``
    (which moves the accepted rows together) or ``extend`` (they stand together already), and ``grow`` with the same
    counts on the host. Rows beyond a sequence's length are never read.

    Sequences come with ``join`` and go with ``select``. Buffers stay where they are until they are full; then
    ``reserve`` doubles their rows and ``join`` their slots, and what they hold is copied.

    Args:
        slots: Sequences.
        capacity: Rows per slot at the start.
        num_layers: Layers of the base.
        device: Where lengths and indices live; each layer's rows live where the layer computes.
        limit: Rows per slot that it may grow to; None = as far as memory goes.

    Attributes:
        capacity: Rows per slot now.
        lengths: [slots] int64 on the device, committed rows per slot.
        host_lengths: The same numbers on the host: shapes follow from them without waiting for the device.
        kv_length: Rows per slot that this step's attention reads, committed and new.
        nodes: N, rows per slot that this step writes.
        write_rows: [slots * N] rows of the flattened buffers that this step writes.
        followers: Caches of drafters' own models over the same sequences, see ``follower``.
        recorded: What ``medusa.engine.graph`` has recorded over the buffers where they are now, by the number of slots;
            empty once they move.
    """

    observes = False
    """As a follower, it is told what the base commits."""

    def __init__(
        self, slots: int, capacity: int, num_layers: int, device: torch.device | str, limit: int | None = None
    ) -> None:
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.slots, self.capacity, self.limit = slots, capacity, sys.maxsize if limit is None else limit
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.host_lengths = [0] * slots
        self._number(slots)
        self.kv_length = self.nodes = 0
        self.followers: dict[object, SlotCache] = {}
        self.recorded: dict[int, Any] = {}
        self._fixed = False
        self.write_rows = PerDevice(self.lengths)

    @property
    def first_rows(self) -> Tensor:
        """[slots] where each slot begins in the flattened buffers; the same memory as long as these do not move."""
        return self._first_rows[: self.slots]

    @property
    def numbered(self) -> int:
        """Slots that buffers have room for, at least."""
        return len(self._first_rows)

    @property
    def longest(self) -> int:
        """Largest committed length."""
        return max(self.host_lengths, default=0)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows per slot; where there is none, the capacity at least doubles.

        Raises:
            ValueError: They are more than the limit.
        """
        if rows <= self.capacity:
            return
        if rows > self.limit:
            raise ValueError(f"cache rows per slot ({rows}) exceed the limit ({self.limit}); ask for a larger limit")
        capacity = max(rows, min(2 * self.capacity, self.limit))
        for layer in self.layers:
            layer.resize(capacity, kept=self.longest)
        self.capacity = capacity
        self._number(self.slots)

    def begin(self, nodes: int) -> None:
        """Prepare to write ``nodes`` rows behind the committed rows of every slot.

        Raises:
            ValueError: They do not fit within the limit.
        """
        if not self._fixed:
            self.reserve(self.longest + nodes)
        self.nodes, self.kv_length = nodes, self.capacity if self._fixed else self.longest + nodes
        offsets = torch.arange(nodes, device=self.lengths.device)
        self.write_rows = PerDevice((self.first_rows[:, None] + self.lengths[:, None] + offsets).flatten())

    def commit(self, path_BA: Tensor, counts_B: Tensor) -> None:
        """Keep the rows of the accepted paths and forget the others.

        Args:
            path_BA: [slots, A] node indices of the accepted paths from the root on; entry i beyond a path's end must
                be i itself (that row then stays where it is).
            counts_B: [slots] accepted rows, 0 leaves a slot as it was.
        """
        base_B1 = (self.first_rows + self.lengths)[:, None]
        source_BA, target_BA = base_B1 + path_BA, base_B1 + torch.arange(path_BA.shape[1], device=path_BA.device)
        native.move_rows(list(self._buffers()), source_BA.flatten(), target_BA.flatten())
        self.extend(counts_B)

    def extend(self, counts_B: Tensor) -> None:
        """Count the first ``counts_B`` rows just written as committed; they already stand where they belong."""
        self.lengths = self.lengths + counts_B

    def grow(self, counts: Sequence[int]) -> None:
        """The same for the host's numbers."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]

    def cut(self, lengths: Sequence[int]) -> None:
        """Forget the rows of each slot behind its first ``lengths``, on the device and on the host.

        There are as many slots afterwards as lengths: those that ``select`` has dropped, but nothing has overwritten,
        can come back.
        """
        if len(lengths) != self.slots:
            self.followers = {}
        for follower in self.followers.values():
            follower.cut([min(pair) for pair in zip(follower.host_lengths, lengths, strict=True)])
        self._count(lengths)

    def follower(self, model: object, build: Callable[[int], "SlotCache"]) -> "SlotCache":
        """The cache of another model over the same sequences, which join and leave it as they do here.

        Args:
            model: Whose it is.
            build: An empty one for so many slots, at the first call.
        """
        if model not in self.followers:
            self.followers[model] = build(self.slots)
        return self.followers[model]

    @contextmanager
    def provisional(self) -> Iterator[None]:
        """Forget at the end what is committed from now on."""
        lengths, host_lengths = self.lengths, self.host_lengths
        try:
            yield
        finally:
            self.lengths, self.host_lengths = lengths, host_lengths

    def _count(self, lengths: Sequence[int]) -> None:
        """There are so many slots, with so many committed rows."""
        self.slots, self.host_lengths = len(lengths), list(lengths)
        self.lengths = torch.tensor(self.host_lengths, dtype=torch.int64, device=self.lengths.device)
        if self.slots > self.numbered:
            self._number(self.slots)

    @torch.inference_mode()
    def join(self, other: "SlotCache") -> None:
        """Add the other's sequences behind those that are here; their rows are copied."""
        self.limit = max(self.limit, other.longest)
        self.reserve(other.longest)
        pairs = zip(self.layers, other.layers, strict=True)
        moved = [ours.take(theirs, self.slots, other.longest) for ours, theirs in pairs]
        if any(moved):
            self.recorded = {}
        for model in self.followers | other.followers:
            like = self.followers.get(model) or other.followers[model]
            mine = self.follower(model, like.empty)
            mine.join(other.follower(model, like.empty))
        lengths = torch.cat([self.lengths, other.lengths])
        self._count([*self.host_lengths, *other.host_lengths])
        self.lengths = lengths

    @torch.inference_mode()
    def select(self, slots: Sequence[int]) -> None:
        """Keep these slots alone: each takes the place of its index among them, which must not lie behind its own.

        The buffers stay: the next sequences that join need no new memory.
        """
        for place, slot in enumerate(slots):
            if slot != place:
                for layer in self.layers:
                    layer.move(slot, place, self.host_lengths[slot])
        for follower in self.followers.values():
            follower.select(slots)
        lengths = self.lengths[torch.tensor(slots, dtype=torch.int64, device=self.lengths.device)]
        self._count([self.host_lengths[slot] for slot in slots])
        self.lengths = lengths

    def observe(self, hidden_BCF: Tensor, tokens_BC: Tensor, counts: Sequence[int]) -> None:
        """The base has committed so many rows of the first slots, just now.

        Args:
            hidden_BCF: Its hidden states there.
            tokens_BC: The tokens that follow them in the texts.
            counts: Rows of each slot, from the first on.
        """

    @property
    def observers(self) -> "list[SlotCache]":
        """Followers that are told what the base commits."""
        return [follower for follower in self.followers.values() if follower.observes]

    def empty(self, slots: int) -> "SlotCache":
        """An empty cache of the same layers."""
        return SlotCache(slots, self.capacity, len(self.layers), self.lengths.device)

    @contextmanager
    def leading(self, slots: int) -> Iterator[None]:
        """Until the end a pass is over the first ``slots`` sequences alone; room for its rows is there already."""
        behind, lengths = self.host_lengths[slots:], self.lengths[slots:]
        self.slots, self.host_lengths, self.lengths = slots, self.host_lengths[:slots], self.lengths[:slots]
        try:
            yield
        finally:
            self.host_lengths, self.lengths = [*self.host_lengths, *behind], torch.cat([self.lengths, lengths])
            self.slots = len(self.host_lengths)

    @contextmanager
    def fixed_shapes(self) -> Iterator[None]:
        """Until the end attention reads all rows that there are; the host has made room for what is written."""
        self._fixed = True
        try:
            yield
        finally:
            self._fixed = False

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget all rows. What attention skips may not be NaN, and what was left here might be: it becomes 0."""
        self.cut([])
        for buffer in self._buffers():
            buffer.zero_()

    def _number(self, slots: int) -> None:
        """Say where so many slots begin; what was recorded reads the old numbers."""
        self.recorded = {}
        self._first_rows = torch.arange(slots, device=self.lengths.device) * self.capacity

    def _buffers(self) -> Iterator[Tensor]:
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                yield layer.keys
                yield layer.values
