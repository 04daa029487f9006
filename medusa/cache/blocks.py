"""The rows of a cache's sequences in blocks of a pool: who joins or leaves copies nothing."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa.attention.contract import BlockTable
from medusa.cache.layer import Owner, SlotLayer
from medusa.cache.pool import BLOCK, BlockPool
from medusa.cache.rows import Rows


class BlockLayer(SlotLayer):
    """One layer's keys and values, [blocks, BLOCK, Hkv, D], shared with all caches of the pool."""

    def __init__(self, cache: Owner, pool: BlockPool, index: int) -> None:
        self._pool, self._arena = pool, pool.arenas[index]
        super().__init__(cache)

    # transformers' class sets these three; they are the arena's.
    @property
    def keys(self) -> Tensor | None:
        """Of the arena as it is now."""
        return self._arena.keys

    @keys.setter
    def keys(self, _: Tensor | None) -> None: ...

    @property
    def values(self) -> Tensor | None:
        """Likewise."""
        return self._arena.values

    @values.setter
    def values(self, _: Tensor | None) -> None: ...

    @property
    def is_initialized(self) -> bool:
        """Whether a layer of any cache has written."""
        return self._arena.keys is not None

    @is_initialized.setter
    def is_initialized(self, _: bool) -> None: ...

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``SlotLayer``."""
        self._arena.allocate(self._pool.blocks, key_states, value_states)

    def seen(self, buffer: Tensor, batch: int) -> Tensor:
        """View [1, Hkv, blocks * BLOCK, D] of the rows of all blocks, for an attention that has the plan's table."""
        return buffer.flatten(0, 1).transpose(0, 1)[None]


@dataclass
class _Sequence:
    """The blocks of one slot, in order.

    Attributes:
        blocks: Held by it.
        entries: Numbers of the index entries of those that others can find: the first ones.
    """

    blocks: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)


class BlockRows:
    """Row p of a slot is row p % BLOCK of its block p // BLOCK.

    What it holds goes back to the pool when it is dropped, however that comes about.
    """

    def __init__(self, cache: Owner, pool: BlockPool) -> None:
        self.pool, self._capacity = pool, cache.capacity
        self.layers: list[SlotLayer] = [BlockLayer(cache, pool, index) for index in range(len(pool.arenas))]
        self._sequences = [_Sequence() for _ in range(cache.slots)]
        self._blocks: Tensor | None = None  # [slots, W] the same for kernels; None = made anew when asked for
        weakref.finalize(self, _release, pool, self._sequences).atexit = False

    @property
    def shape(self) -> tuple[int, int]:
        """See ``Rows``, here and below."""
        return self.pool.blocks, BLOCK

    @property
    def table(self) -> BlockTable:
        """Where a slot has no block yet, it says 0."""
        if self._blocks is None:
            width = max([-(-self._capacity // BLOCK), *(len(one.blocks) for one in self._sequences)])
            rows = [one.blocks + [0] * (width - len(one.blocks)) for one in self._sequences]
            self._blocks = torch.tensor(rows, dtype=torch.int64).view(len(rows), width)
        return BlockTable(self._blocks, BLOCK)

    def widen(self, capacity: int, kept: int) -> None:
        """Needs no memory but the table's."""
        self._capacity, self._blocks = capacity, None

    @torch.inference_mode()
    def prepare(self, lengths: Sequence[int]) -> None:
        """Takes blocks where a slot's are full."""
        for slot, (one, length) in enumerate(zip(self._sequences, lengths, strict=False)):
            missing = -(-length // BLOCK) - len(one.blocks)
            if missing > 0:
                first, new = len(one.blocks), self.pool.take(missing)
                one.blocks += new
                if self._blocks is not None:
                    self._blocks[slot, first : first + missing] = torch.tensor(new)

    def places(self, positions_BN: Tensor) -> Tensor:
        """Through the table."""
        return self.table.places(positions_BN)

    def join(self, other: Rows, slots: int, theirs: int, kept: int) -> bool:
        """Takes the other's blocks over: it has no slots afterwards."""
        assert isinstance(other, BlockRows) and other.pool is self.pool, "caches of one base share a pool"
        self._sequences += other._sequences
        other._sequences.clear()
        self._blocks = other._blocks = None
        return False

    def select(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Gives back the blocks of the others."""
        kept = [self._sequences[slot] for slot in slots]
        gone = [one for slot, one in enumerate(self._sequences) if slot not in set(slots)]
        self._sequences[:], self._blocks = kept, None
        _release(self.pool, gone)

    def cut(self, lengths: Sequence[int]) -> bool:
        """Gives back blocks behind the new lengths. A length beyond the old one gets rows of undefined content."""
        _release(self.pool, self._sequences[len(lengths) :])
        del self._sequences[len(lengths) :]
        self._sequences += [_Sequence() for _ in range(len(lengths) - len(self._sequences))]
        self._blocks = None
        for one, length in zip(self._sequences, lengths, strict=True):
            self._cut(one, length)
        self.prepare(lengths)
        return False

    def recall(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Whole blocks."""
        self._blocks = None
        for one, tokens in zip(self._sequences, texts, strict=True):
            assert not one.blocks, "recalled before anything is written"
            chain = self.pool.find(tokens)
            one.blocks += [entry.block for entry in chain]
            one.entries += [entry.number for entry in chain]
        return [len(one.blocks) * BLOCK for one in self._sequences]

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Its full blocks."""
        one = self._sequences[slot]
        for index in range(len(one.entries), len(tokens) // BLOCK):
            before = one.entries[-1] if one.entries else 0
            entry = self.pool.add(one.blocks[index], before, tokens[index * BLOCK : (index + 1) * BLOCK])
            one.entries.append(entry.number)
            if entry.block != one.blocks[index]:
                one.blocks[index], self._blocks = entry.block, None

    def _cut(self, one: _Sequence, length: int) -> None:
        """The block that the next row goes into becomes its own, where others know it."""
        whole, behind = divmod(length, BLOCK)
        kept = whole + bool(behind)
        extra, one.blocks[kept:] = one.blocks[kept:], []
        self.pool.release(extra)
        if behind and whole < len(one.entries):
            (own,) = self.pool.take(1)
            self.pool.copy(one.blocks[whole], own)
            self.pool.release([one.blocks[whole]])
            one.blocks[whole] = own
        del one.entries[whole:]


def _release(pool: BlockPool, sequences: list[_Sequence]) -> None:
    for one in sequences:
        blocks, one.blocks = one.blocks, []
        pool.release(blocks)
