"""Blocks of rows that all sequences of a base share: memory follows the tokens held, and equal beginnings are one."""

import weakref
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from medusa.cache.index import BlockIndex, Entry

BLOCK = 32
"""Rows of a block. Fewer would be shared and wasted in smaller parts, and cost attention a little time."""
RESERVED = 131_072
"""Rows that a pool without a limit has addresses for at first. Addresses cost nothing; to get more, all rows are
copied, which holds up all sequences for seconds."""


class PoolFullError(ValueError):
    """The sequences hold as many blocks as the pool may have."""


class Arena:
    """One layer's keys and values, [blocks, BLOCK, Hkv, D]; pages that were never written cost no memory."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def allocate(self, blocks: int, key_states: Tensor, value_states: Tensor) -> None:
        """For key and value states [B, Hkv, N, D]."""
        self.keys, self.values = (
            states.new_empty(blocks, BLOCK, states.shape[1], states.shape[3]) for states in (key_states, value_states)
        )

    @torch.inference_mode()
    def grow(self, blocks: int, kept: int) -> None:
        """Move the first ``kept`` blocks to a larger place."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_empty(blocks, *old.shape[1:])
                new[:kept] = old[:kept]
                setattr(self, name, new)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return sum(buffer[:1].nbytes for buffer in (self.keys, self.values) if buffer is not None)


class BlockPool:
    """Blocks of ``BLOCK`` rows in all layers, for the sequences of one base; for one thread.

    A block is held by one sequence, or by several that begin with the same text. What nobody holds any more is still
    found by its text until its memory is needed; the one that was not used for longest goes first.

    Args:
        num_layers: Layers of the base.
        tokens: Rows at most, held and remembered; addresses for them are reserved at once, memory is used when they are
            written. None = as many as are held at a time; then growth copies what there is, and what is only remembered
            never makes it grow.
        owner: Whose rows these are; caches of another base are refused.

    Attributes:
        asked: Tokens of texts that were looked up.
        found: Those of them that were known.
        evictions: Blocks that were given up for others.
    """

    def __init__(self, num_layers: int, tokens: int | None = None, owner: object = None) -> None:
        self.limit, self.owner = None if tokens is None else tokens // BLOCK, owner
        self.arenas = [Arena() for _ in range(num_layers)]
        self.blocks = -(-RESERVED // BLOCK) if self.limit is None else self.limit
        self.asked = self.found = self.evictions = 0
        self._touched = 0
        self._free: list[int] = []
        self._users: Counter[int] = Counter()
        self._index = BlockIndex(BLOCK)
        self._claims: weakref.WeakKeyDictionary[Hashable, int] = weakref.WeakKeyDictionary()

    @property
    def tokens(self) -> int | None:
        """Rows at most; None = no limit."""
        return None if self.limit is None else self.limit * BLOCK

    @property
    def held_tokens(self) -> int:
        """Rows of the blocks that sequences hold, each counted once."""
        return len(self._users) * BLOCK

    @property
    def remembered_tokens(self) -> int:
        """Rows of the blocks that nobody holds and that can still be found."""
        return self._index.idle * BLOCK

    @property
    def claimed_tokens(self) -> int:
        """Rows that requests in progress may come to, see ``claim``."""
        return sum(self._claims.values()) * BLOCK

    @property
    def bytes(self) -> int:
        """Memory of all blocks that were ever written."""
        return self._touched * sum(arena.block_bytes for arena in self.arenas)

    def claim(self, who: Hashable, rows: int) -> bool:
        """Promise room for so many rows until ``drop``, or as long as ``who`` exists; whether there is that much."""
        blocks = -(-rows // BLOCK)
        if self.limit is not None and blocks + sum(self._claims.values()) > self.limit:
            return False
        self._claims[who] = blocks
        return True

    def check(self, rows: int) -> None:
        """Refuse what will never find room.

        Raises:
            PoolFullError: It will not.
        """
        if self.limit is not None and -(-rows // BLOCK) > self.limit:
            raise PoolFullError(
                f"prompt and completion ({rows} rows with their drafts) exceed the KV cache ({self.tokens} rows); ask"
                " for fewer tokens or make the cache larger"
            )

    def drop(self, who: Hashable) -> None:
        """The promise is not needed any more."""
        self._claims.pop(who, None)

    def take(self, count: int) -> list[int]:
        """So many blocks for one sequence, which nobody else holds; what they contain is undefined.

        Raises:
            PoolFullError: There are not that many.
        """
        fresh = count - len(self._free) - self._index.idle
        if self.limit is not None and fresh > self.limit - self._touched:
            raise PoolFullError(
                f"KV cache ({self.tokens} rows) is full: {self.held_tokens} are held, {count * BLOCK} more needed; let"
                " fewer requests in at a time or make the cache larger"
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

    def known(self, tokens: Sequence[int]) -> int:
        """How many tokens of a text's beginning could be found."""
        return sum(BLOCK for _ in self._index.chain(tokens))

    def find(self, tokens: Sequence[int]) -> list[Entry]:
        """The known blocks of a text's beginning, which are held from now on; ``release`` them."""
        chain = list(self._index.chain(tokens))
        self.asked, self.found = self.asked + len(tokens), self.found + len(chain) * BLOCK
        for entry in chain:
            self._hold(entry.block)
        return chain

    def add(self, block: int, before: int, tokens: Sequence[int]) -> Entry:
        """Let others find a block that its sequence has filled; it is written no more.

        Where an equal one is known, that one takes its place.

        Args:
            block: Held by one sequence.
            before: Number of the entry before it in the text, 0 = none.
            tokens: Its own.

        Returns:
            The entry, whose block the sequence holds now.
        """
        entry = self._index.add(block, before, tokens)
        if entry.block != block:
            self._hold(entry.block)
            self.release([block])
        return entry

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy the rows of one block to another."""
        for arena in self.arenas:
            for buffer in (arena.keys, arena.values):
                if buffer is not None:
                    buffer[target] = buffer[source]

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
        if self._touched == self.blocks:
            self.blocks *= 2
            for arena in self.arenas:
                arena.grow(self.blocks, self._touched)
        self._touched += 1
        return self._touched - 1
