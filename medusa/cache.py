"""The KV cache: preallocated rows per sequence slot; a step writes its tree rows and keeps the accepted ones."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, capacity, Hkv, D] (the layout that flash-attn reads).

    Allocated at the first write, when the layer's head sizes are known.
    """

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for key and value states [B, Hkv, N, D]."""
        rows = (self.cache.slots, self.cache.capacity)
        self.keys = key_states.new_zeros(*rows, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(*rows, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the rows of this step, [B, Hkv, N, D], and return views [B, Hkv, kv_length, D] of all rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        views = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            rows = states.transpose(1, 2).flatten(0, 1)
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, self.cache.write_rows, rows)
            views.append(buffer[: len(states), : self.cache.kv_length].transpose(1, 2))
        return views[0], views[1]

    def get_seq_length(self) -> int:
        """Longest committed length in tokens."""
        return self.cache.longest

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

    Attributes:
        lengths: [slots] int64 on the device, committed rows per slot.
        host_lengths: The same numbers on the host: shapes follow from them without waiting for the device.
    """

    def __init__(self, slots: int, capacity: int, num_layers: int, device: torch.device | str) -> None:
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.slots, self.capacity = slots, capacity
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.first_rows = torch.arange(slots, device=device) * capacity
        self.host_lengths = [0] * slots
        self.kv_length = 0
        self.write_rows = self.lengths

    @property
    def longest(self) -> int:
        """Largest committed length."""
        return max(self.host_lengths)

    def begin(self, nodes: int) -> None:
        """Prepare to write ``nodes`` rows behind the committed rows of every slot.

        Raises:
            ValueError: They do not fit.
        """
        self.kv_length = self.longest + nodes
        if self.kv_length > self.capacity:
            raise ValueError(
                f"cache capacity ({self.capacity} rows) is smaller than {self.longest} committed rows and {nodes} new"
                " ones; ask for a larger capacity"
            )
        offsets = torch.arange(nodes, device=self.lengths.device)
        self.write_rows = (self.first_rows[:, None] + self.lengths[:, None] + offsets).flatten()

    def commit(self, path_BA: Tensor, counts_B: Tensor) -> None:
        """Keep the rows of the accepted paths and forget the others.

        Args:
            path_BA: [slots, A] node indices of the accepted paths from the root on; entry i beyond a path's end must
                be i itself (that row then stays where it is).
            counts_B: [slots] accepted rows, 0 leaves a slot as it was.
        """
        base_B1 = (self.first_rows + self.lengths)[:, None]
        source = (base_B1 + path_BA).flatten()
        target = (base_B1 + torch.arange(path_BA.shape[1], device=path_BA.device)).flatten()
        for buffer in self._buffers():
            rows = buffer.view(-1, *buffer.shape[2:])
            rows.index_copy_(0, target, rows.index_select(0, source))
        self.extend(counts_B)

    def extend(self, counts_B: Tensor) -> None:
        """Count the first ``counts_B`` rows just written as committed; they already stand where they belong."""
        self.lengths = self.lengths + counts_B

    def grow(self, counts: Sequence[int]) -> None:
        """The same for the host's numbers."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]

    def _buffers(self) -> Iterator[Tensor]:
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                yield layer.keys
                yield layer.values
