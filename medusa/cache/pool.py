"""Blocks of positions that all sequences of a base share: memory follows the tokens held, equal beginnings are one."""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Protocol

import torch

from medusa.cache.index import BlockIndex, Entry
from medusa.cache.layer import Arena, PassCache
from medusa.cache.table import BlockTables

BLOCK = 32
"""Positions of a block. Fewer would be shared and wasted in smaller parts, and cost attention a little time."""
RESERVED = 131_072
"""Positions that a pool without a limit has addresses for at first, on a CPU. Addresses cost nothing; to get more, all
that is there is copied, which holds up all sequences for seconds."""
RESERVED_ON_DEVICE = 8_192
"""The same elsewhere, where addresses are memory."""


class PoolFullError(ValueError):
    """The sequences hold as many blocks as the pool may have."""


class Beside(Protocol):
    """Another model over the same texts."""

    def new_pool(self) -> "BlockPool":
        """An empty pool of its own."""


class BlockPool:
    """Blocks of ``BLOCK`` positions in all layers, for the sequences of one base; for one thread.

    A block is held by one sequence, or by several that begin with the same text. What nobody holds any more is still
    found by its text until its memory is needed; the one that was not used for longest goes first.

    Args:
        num_layers: Layers of the base.
        device: Where its output layer is, and tables; each layer's keys and values are where the layer computes.
        tokens: Positions at most, held and remembered. Memory for them is reserved at once; on a CPU it is used when
            it is written. None = as many as are held at a time; then growth copies what there is, and what is only
            remembered never makes it grow.
        owner: Whose keys and values these are; sequences of another base are refused.
        ahead: What stands at a position depends on the token behind it too.

    Attributes:
        size: Positions of a block.
        limit: Blocks at most, with one that is nobody's; None = no limit.
        arenas: Keys and values by layer.
        cache: The pool's face towards transformers.
        tables: Which blocks each sequence has.
        asked: Tokens of texts that were looked up.
        found: Those of them that were known.
        evictions: Blocks that were given up for others.
    """

    size = BLOCK

    def __init__(
        self,
        num_layers: int,
        device: torch.device,
        tokens: int | None = None,
        owner: object = None,
        ahead: bool = False,
    ) -> None:
        self._ahead = ahead
        self.limit, self.owner, self.device = None if tokens is None else tokens // BLOCK + 1, owner, device
        self.arenas = [Arena(BLOCK) for _ in range(num_layers)]
        reserved = RESERVED if device.type == "cpu" else RESERVED_ON_DEVICE
        self._blocks = -(-reserved // BLOCK) if self.limit is None else self.limit
        self.cache = PassCache(self.arenas, self._blocks)
        self.tables = BlockTables(device)
        self.asked = self.found = self.evictions = 0
        self._beside: weakref.WeakKeyDictionary[object, BlockPool] = weakref.WeakKeyDictionary()
        self._touched = 1  # block 0 is nobody's: what is written for sequences that do not exist goes there
        self._moves = 0
        self._free: list[int] = []
        self._users: Counter[int] = Counter()
        self._index = BlockIndex(BLOCK)

    @property
    def tokens(self) -> int | None:
        """Positions at most; None = no limit."""
        return None if self.limit is None else (self.limit - 1) * BLOCK

    @property
    def held_tokens(self) -> int:
        """Positions of the blocks that sequences hold, each counted once."""
        return len(self._users) * BLOCK

    @property
    def remembered_tokens(self) -> int:
        """Positions of the blocks that nobody holds and that can still be found."""
        return len(self._index.idle) * BLOCK

    @property
    def available(self) -> float:
        """Blocks that can be taken now."""
        if self.limit is None:
            return float("inf")
        return self.limit - self._touched + len(self._free) + len(self._index.idle)

    @property
    def bytes(self) -> int:
        """Memory of all blocks that were ever written, those of other models over the same texts too."""
        own = self._touched * sum(arena.block_bytes for arena in self.arenas)
        return own + sum(pool.bytes for pool in self._beside.values())

    @property
    def epoch(self) -> tuple[int, int]:
        """Changes when anything that a recorded step reads has moved."""
        return self._moves, self.tables.epoch

    def beside(self, model: object, build: "Callable[[], BlockPool]") -> "BlockPool":
        """The pool of another model over the same texts, which goes with this one; made at the first call."""
        if model not in self._beside:
            self._beside[model] = build()
        return self._beside[model]

    def check(self, tokens: int) -> None:
        """Refuse what will never find room.

        Raises:
            PoolFullError: It will not.
        """
        if self.limit is not None and -(-tokens // BLOCK) > self.limit - 1:
            raise PoolFullError(
                f"prompt and completion ({tokens} positions with their drafts) exceed the KV cache ({self.tokens}"
                " positions); ask for fewer tokens or make the cache larger"
            )

    def check_integrity(self) -> None:
        """Every block that was ever taken is free, held, or known and idle, and one of these alone.

        Raises:
            AssertionError: Blocks were lost, or are in two places.
        """
        free, used, idle = set(self._free), set(self._users), set(self._index.idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & used and not free & idle and not used & idle, "a block is in two states"
        assert len(free) + len(used) + len(idle) == self._touched - 1, "blocks are lost"
        assert all(count > 0 for count in self._users.values()), "a held block has no holder"

    def take(self, count: int) -> list[int]:
        """So many blocks for one sequence, which nobody else holds; what they contain is undefined.

        Raises:
            PoolFullError: There are not that many.
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
        """A sequence does not hold these any more, which are in the order of its text."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if block in self._index:
                    self._index.rest(block)
                else:
                    self._free.append(block)

    def content(self, tokens: Sequence[int]) -> Sequence[Hashable]:
        """What the positions of a text are known by."""
        return list(pairwise(tokens)) if self._ahead else tokens

    def known(self, tokens: Sequence[int], beside: Iterable["Beside"] = ()) -> int:
        """How many tokens of a text's beginning could be found, here and in the pools of other models."""
        known = sum(BLOCK for _ in self._index.chain(self.content(tokens)))
        return min([known, *(self.beside(model, model.new_pool).known(tokens) for model in beside)])

    def needed(self, tokens: Sequence[int], places: int) -> int:
        """Blocks that a text of so many places would take from what is available now, where these tokens are known."""
        held = sum(entry.block in self._users for entry in self._index.chain(self.content(tokens)))
        return -(-places // BLOCK) - held

    def find(self, tokens: Sequence[int], most: int) -> list[Entry]:
        """The known blocks of so many tokens of a text, which are held from now on; ``release`` them."""
        chain = list(islice(self._index.chain(self.content(tokens)), most // BLOCK))
        self.asked, self.found = self.asked + len(tokens), self.found + len(chain) * BLOCK
        for entry in chain:
            self._hold(entry.block)
        return chain

    def add(self, block: int, before: int, content: Sequence[Hashable]) -> Entry:
        """Let others find a block that its sequence has filled; it is written no more.

        Where an equal one is known, that one takes its place.

        Args:
            block: Held by one sequence.
            before: Number of the entry before it in the text, 0 = none.
            content: What its positions are known by.

        Returns:
            The entry, whose block the sequence holds now.
        """
        entry = self._index.add(block, before, content)
        if entry.block != block:
            self._hold(entry.block)
            self.release([block])
        return entry

    def _hold(self, block: int) -> None:
        self._users[block] += 1
        self._index.wake(block)

    def _one(self) -> int:
        """A free block; without a limit, what is remembered goes before memory grows."""
        if self._free:
            return self._free.pop()
        room = self.limit is not None and self._touched < self.limit
        if self._index.idle and not room:
            self.evictions += 1
            return self._index.give_up()
        if self._touched == self._blocks:
            self._blocks, self._moves = 2 * self._blocks, self._moves + 1
            self.cache.blocks = self._blocks
            for arena in self.arenas:
                arena.grow(self._blocks, self._touched)
        self._touched += 1
        return self._touched - 1
