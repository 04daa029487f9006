"""The KV cache: rows per sequence slot; a step writes its tree rows behind them and keeps the accepted ones."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from medusa.attention.contract import BlockTable
from medusa.cache.blocks import BlockRows
from medusa.cache.layer import PerDevice
from medusa.cache.pool import BlockPool
from medusa.cache.rows import Rows, SlotRows
from medusa.cpu import native


class SlotCache(Cache):
    """Keys and values of ``slots`` sequences of different lengths.

    The order of a step: ``begin`` (where the tree rows go), the base's forward pass (which writes them), ``commit``
    (which moves the accepted rows together) or ``extend`` (they stand together already), and ``grow`` with the same
    counts on the host. Rows beyond a sequence's length are never read.

    Sequences come with ``join`` and go with ``select``. Where their rows stand, and what it costs to join, to leave and
    to grow, is the affair of ``rows``.

    Args:
        slots: Sequences.
        capacity: Rows per slot at the start.
        num_layers: Layers of the base.
        device: Where lengths and indices live; each layer's rows live where the layer computes.
        limit: Rows per slot that it may grow to; None = as far as memory goes.
        pool: Where rows stand, in blocks; None = side by side in buffers of its own.

    Attributes:
        rows: Where rows stand.
        capacity: Rows per slot now.
        lengths: [slots] int64 on the device, committed rows per slot.
        host_lengths: The same numbers on the host: shapes follow from them without waiting for the device.
        kv_length: Rows per slot that this step's attention reads, committed and new.
        nodes: N, rows per slot that this step writes.
        followers: Caches of drafters' own models over the same sequences, see ``follower``.
        recorded: What ``medusa.engine.graph`` has recorded over the buffers where they are now, by the number of slots;
            empty once they move.
    """

    observes = False
    """As a follower, it is told what the base commits."""

    def __init__(
        self,
        slots: int,
        capacity: int,
        num_layers: int,
        device: torch.device | str,
        limit: int | None = None,
        pool: BlockPool | None = None,
    ) -> None:
        self.slots, self.capacity, self.limit = slots, capacity, sys.maxsize if limit is None else limit
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.host_lengths = [0] * slots
        self.rows: Rows = SlotRows(self, num_layers, self.lengths.device) if pool is None else BlockRows(self, pool)
        super().__init__(layers=self.rows.layers)
        self.kv_length = self.nodes = 0
        self.followers: dict[object, SlotCache] = {}
        self.recorded: dict[int, Any] = {}
        self._fixed = False
        self._write_rows: PerDevice | None = None

    @property
    def write_rows(self) -> PerDevice:
        """[slots * N] rows of the flattened buffers that this step writes; until it commits."""
        if self._write_rows is None:
            offsets = torch.arange(self.nodes, device=self.lengths.device)
            self._write_rows = PerDevice(self.rows.places(self.lengths[:, None] + offsets).flatten())
        return self._write_rows

    @property
    def shape(self) -> tuple[int, int]:
        """Slots and rows of each, or blocks and rows of each, that buffers have."""
        return self.rows.shape

    @property
    def table(self) -> BlockTable | None:
        """Where rows stand that are in blocks, for the attention over all slots; None = side by side."""
        return self.rows.table

    @property
    def pool(self) -> BlockPool | None:
        """Whose blocks rows stand in; None = in none."""
        return self.rows.pool if isinstance(self.rows, BlockRows) else None

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
        self.rows.widen(capacity, kept=self.longest)
        self.capacity = capacity
        self.recorded = {}

    def begin(self, nodes: int) -> None:
        """Prepare to write ``nodes`` rows behind the committed rows of every slot.

        Raises:
            ValueError: They do not fit within the limit, of a slot or of the pool.
        """
        if not self._fixed:
            self.reserve(self.longest + nodes)
        self.rows.prepare([length + nodes for length in self.host_lengths])
        self.nodes, self.kv_length = nodes, self.capacity if self._fixed else self.longest + nodes
        self._write_rows = None

    def commit(self, path_BA: Tensor, counts_B: Tensor) -> None:
        """Keep the rows of the accepted paths and forget the others.

        Args:
            path_BA: [slots, A] node indices of the accepted paths from the root on; entry i beyond a path's end must
                be i itself (that row then stays where it is).
            counts_B: [slots] accepted rows, 0 leaves a slot as it was.
        """
        # A step that is recorded asks nothing.
        if self._fixed or path_BA.device.type != "cpu" or _any_moves(path_BA, counts_B):
            buffers = list(self._buffers())
            if native.reads_indices(path_BA) and all(buffer.device.type == "cpu" for buffer in buffers):
                native.keep_rows(buffers, path_BA, counts_B, self.lengths, self.table, self.capacity)
            else:
                self._move(buffers, path_BA)
        self.extend(counts_B)

    def _move(self, buffers: Sequence[Tensor], path_BA: Tensor) -> None:
        """The rows of paths, on any devices."""
        offsets_A, lengths_B1 = torch.arange(path_BA.shape[1], device=path_BA.device), self.lengths[:, None]
        places = self.rows.places(lengths_B1 + path_BA).flatten(), self.rows.places(lengths_B1 + offsets_A).flatten()
        for device in {buffer.device for buffer in buffers}:
            sources, targets = (rows.to(device) for rows in places)
            for rows in (buffer.flatten(0, 1) for buffer in buffers if buffer.device == device):
                rows.index_copy_(0, targets, rows.index_select(0, sources))

    def extend(self, counts_B: Tensor) -> None:
        """Count the first ``counts_B`` rows just written as committed; they already stand where they belong."""
        self.lengths = self.lengths + counts_B

    def grow(self, counts: Sequence[int]) -> None:
        """The same for the host's numbers."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]

    def cut(self, lengths: Sequence[int]) -> None:
        """Forget the rows of each slot behind its first ``lengths``, on the device and on the host.

        There are as many slots afterwards as lengths. A length beyond the rows that there are gets rows of undefined
        content: whoever wants that writes them, or does not care.
        """
        if len(lengths) != self.slots:
            self.followers = {}
        for follower in self.followers.values():
            follower.cut([min(pair) for pair in zip(follower.host_lengths, lengths, strict=True)])
        if self.rows.cut(lengths):
            self.recorded = {}
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

    @torch.inference_mode()
    def join(self, other: "SlotCache") -> None:
        """Add the other's sequences behind those that are here; the other may not be used any more."""
        self.limit = max(self.limit, other.longest)
        self.reserve(other.longest)
        if self.rows.join(other.rows, self.slots, other.slots, other.longest):
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
        """Keep these slots alone: each takes the place of its index among them, which must not lie behind its own."""
        self.rows.select(slots, self.host_lengths)
        for follower in self.followers.values():
            follower.select(slots)
        lengths = self.lengths[torch.tensor(slots, dtype=torch.int64, device=self.lengths.device)]
        self._count([self.host_lengths[slot] for slot in slots])
        self.lengths = lengths

    def recall(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Begin the slots of an empty cache with rows of their texts that are known already.

        Not where a follower needs the hidden states of all tokens.

        Args:
            texts: Token ids, for each slot.

        Returns:
            How many rows of each slot are there now.
        """
        found = [0] * self.slots if self.observers else self.rows.recall(texts)
        self._count(found)
        return found

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Let later sequences recall the committed rows of a slot, whose text begins with these tokens."""
        self.rows.remember(slot, tokens[: self.host_lengths[slot]])

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
        return SlotCache(slots, self.capacity, len(self.layers), self.lengths.device, pool=self.pool)

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
        if (
            self.pool is not None
        ):  # rows of others stand there too, and the exact attention reads none of those left here
            return
        for buffer in self._buffers():
            buffer.zero_()

    def _buffers(self) -> Iterator[Tensor]:
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                yield layer.keys
                yield layer.values


def _any_moves(path_BA: Tensor, counts_B: Tensor) -> bool:
    """Whether any node of these paths does not stand at its place already; on a CPU asking is free."""
    pairs = zip(path_BA.tolist(), counts_B.tolist(), strict=True)
    return any(node != place for path, count in pairs for place, node in enumerate(path[:count]))
