"""The block pool of a base's sequences: memory grows with the tokens held, and equal prefixes are stored once."""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Protocol

import torch
from torch import Tensor

from medusa.cache.index import BLOCK, BlockIndex, Entry
from medusa.cache.layer import Arena, PassCache
from medusa.cache.table import BlockTables
from medusa.recurrence import RecurrentStates

RESERVED = 131_072
"""Positions for which a pool without a limit reserves addresses at first, on a CPU. Addresses cost nothing, but growth
copies all keys and values, which stops all sequences for seconds."""
RESERVED_ON_DEVICE = 8_192
"""The same on other devices, where addresses are memory."""


class PoolFullError(ValueError):
    """The pool has no free block left."""


class Beside(Protocol):
    """Another model over the same texts."""

    def new_pool(self) -> "BlockPool":
        """An empty pool for this model."""


class BlockPool:
    """Blocks of ``BLOCK`` positions in all layers, for the sequences of one base; for one thread.

    A block is held by one sequence, or by several that begin with the same text. A block that no sequence holds any
    more can still be found by its text until its memory is needed; the least recently used is evicted first.

    Args:
        num_layers: Layers of the base.
        device: Device of the output layer and of tables; each layer's keys and values are on the layer's device.
        tokens: Most positions, held and remembered together. Their memory is reserved at once; on a CPU it is used
            when it is written. None = as many as are held at a time: growth copies the pool, and remembered blocks
            never make it grow.
        owner: The model of these keys and values; sequences of another base are refused.
        ahead: Whether the entry at a position also depends on the next token.
        recurrent: Whether the model has recurrent layers: then a text begins only where their states are kept.

    Attributes:
        size: Positions of a block.
        limit: Most blocks, including the unused block 0; None = no limit.
        arenas: Keys and values by layer.
        cache: The pool as a transformers cache.
        tables: The blocks of each sequence.
        recurrent: What recurrent layers keep of each sequence.
    """

    size = BLOCK

    def __init__(
        self,
        num_layers: int,
        device: torch.device,
        tokens: int | None = None,
        owner: object = None,
        ahead: bool = False,
        recurrent: bool = False,
    ) -> None:
        self._ahead, self._stateful = ahead, recurrent
        self.limit, self.owner, self.device = None if tokens is None else tokens // BLOCK + 1, owner, device
        self.arenas = [Arena() for _ in range(num_layers)]
        reserved = RESERVED if device.type == "cpu" else RESERVED_ON_DEVICE
        self.recurrent = RecurrentStates()
        self.cache = PassCache(self.arenas, -(-reserved // BLOCK) if self.limit is None else self.limit, self.recurrent)
        self.tables = BlockTables(device)
        self._beside: weakref.WeakKeyDictionary[Beside, BlockPool] = weakref.WeakKeyDictionary()
        self._touched = 1  # block 0 belongs to no sequence: writes of inert requests go there
        self._moves = 0
        self._free: list[int] = []
        self._users: Counter[int] = Counter()
        self._index = BlockIndex()
        self._addresses = list[int](), torch.empty(0, dtype=torch.int64)

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values of all layers that have been written to."""
        return [buffer for arena in self.arenas for buffer in arena.buffers]

    def addresses(self) -> Tensor:
        """The addresses of ``buffers``, int64 on the pool's device; the same tensor until ``epoch`` changes."""
        now = [buffer.data_ptr() for buffer in self.buffers]
        if now != self._addresses[0]:
            self._addresses = now, torch.tensor(now, device=self.device)
        return self._addresses[1]

    @property
    def tokens(self) -> int | None:
        """Most positions; None = no limit."""
        return None if self.limit is None else (self.limit - 1) * BLOCK

    @property
    def held_tokens(self) -> int:
        """Positions of the blocks that sequences hold, each counted once."""
        return len(self._users) * BLOCK

    @property
    def available(self) -> float:
        """Number of blocks that can be taken now."""
        if self.limit is None:
            return float("inf")
        return self.limit - self._touched + len(self._free) + len(self._index.idle)

    @property
    def bytes(self) -> int:
        """Bytes of all blocks that were ever written, without those of pools beside this one."""
        return self._touched * sum(arena.block_bytes for arena in self.arenas)

    @property
    def epoch(self) -> tuple[int, int]:
        """Changes when memory that a recorded step reads has moved."""
        return self._moves, self.tables.epoch

    def beside(self, model: Beside) -> "BlockPool":
        """The pool of another model over the same texts; made at the first call, and freed with this one."""
        if model not in self._beside:
            self._beside[model] = model.new_pool()
        return self._beside[model]

    def check(self, tokens: int) -> None:
        """Check that this number of positions can ever fit.

        Raises:
            PoolFullError: It cannot.
        """
        if self.limit is not None and -(-tokens // BLOCK) > self.limit - 1:
            raise PoolFullError(
                f"prompt and completion ({tokens} positions with their drafts) exceed the KV cache ({self.tokens}"
                " positions); ask for fewer tokens or make the cache larger"
            )

    def check_integrity(self) -> None:
        """Check that every block is either free, or held, or known and idle.

        Raises:
            AssertionError: Blocks are lost, or in two states.
        """
        free, used, idle = set(self._free), set(self._users), set(self._index.idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & used and not free & idle and not used & idle, "a block is in two states"
        assert len(free) + len(used) + len(idle) == self._touched - 1, "blocks are lost"
        assert all(count > 0 for count in self._users.values()), "a held block has no holder"

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks for one sequence; their contents are undefined.

        Raises:
            PoolFullError: There are fewer free blocks.
        """
        if count > self.available:
            raise PoolFullError(
                f"KV cache ({self.tokens} positions) is full: {self.held_tokens} are held, {count * BLOCK} more needed;"
                " admit fewer requests at a time, or make the cache larger"
            )
        blocks = [self._one() for _ in range(count)]
        self._users.update(blocks)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Release blocks of a sequence, given in the order of its text."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if block in self._index:
                    self._index.rest(block)
                else:
                    self._free.append(block)

    def forget(self) -> None:
        """Forget all texts that no sequence holds, here and in the pools beside: their blocks become free."""
        while self._index.idle:
            self._free.append(self._evict())
        for pool in self._beside.values():
            pool.forget()

    def content(self, tokens: Sequence[int]) -> Sequence[Hashable]:
        """The keys of a text's positions in the index."""
        return list(pairwise(tokens)) if self._ahead else tokens

    def known(self, tokens: Sequence[int], beside: Iterable[Beside] = ()) -> int:
        """Number of tokens at a text's beginning that can be found, here and in the pools of other models."""
        most = min([len(tokens), *(self.beside(model).known(tokens) for model in beside)]) // BLOCK
        chain = list(islice(self._index.chain(self.content(tokens)), most))
        while self._stateful and chain and chain[-1].number not in self.recurrent.saved:
            del chain[-1]
        return len(chain) * BLOCK

    def needed(self, tokens: Sequence[int], places: int) -> int:
        """Number of available blocks that a text of ``places`` positions would take if these tokens are known."""
        held = sum(entry.block in self._users for entry in self._index.chain(self.content(tokens)))
        return -(-places // BLOCK) - held

    def find(self, tokens: Sequence[int], most: int) -> list[Entry]:
        """Find and hold the known blocks at a text's beginning; ``release`` them later."""
        chain = list(islice(self._index.chain(self.content(tokens)), most // BLOCK))
        for entry in chain:
            self._hold(entry.block)
        return chain

    def add(self, block: int, before: int, content: Sequence[Hashable]) -> Entry:
        """Add a full block to the index, so that others can find it; it is not written any more.

        If an equal block is known, that block replaces it.

        Args:
            block: A block that one sequence holds.
            before: Number of the previous entry of the text; 0 = none.
            content: The keys of its positions, see ``content``.

        Returns:
            The entry, whose block the sequence holds now.
        """
        entry = self._index.add(block, before, content)
        if entry.block != block:
            self._hold(entry.block)
            self.release([block])
        return entry

    def grow(self, blocks: int) -> None:
        """Move all blocks to memory for ``blocks`` of them."""
        self.cache.blocks, self._moves = blocks, self._moves + 1
        for arena in self.arenas:
            arena.grow(blocks)

    def _hold(self, block: int) -> None:
        self._users[block] += 1
        self._index.wake(block)

    def _evict(self) -> int:
        entry = self._index.give_up()
        self.recurrent.saved.pop(entry.number, None)
        return entry.block

    def _one(self) -> int:
        """A free block; without a limit, remembered blocks are evicted before memory grows."""
        if self._free:
            return self._free.pop()
        room = self.limit is not None and self._touched < self.limit
        if self._index.idle and not room:
            return self._evict()
        if self._touched == self.cache.blocks:
            self.grow(2 * self._touched)
        self._touched += 1
        return self._touched - 1
