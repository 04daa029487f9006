"""The prefix cache: blocks are found by the text that they hold; the least recently used are evicted first."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

BLOCK = 32
"""Positions of a block. Smaller blocks share more and waste less, but make attention a little slower."""


class Entry(NamedTuple):
    """A block whose content is known.

    Attributes:
        number: Unique number of the entry.
        block: Number of the block in the pool.
        key: The number of the previous entry of the text (0 = the text begins here), and the block's tokens. The
            contents of a block depend on all tokens before it; these are compared exactly, so texts are never confused.
    """

    number: int
    block: int
    key: tuple[int, tuple[Hashable, ...]]


class BlockIndex:
    """The known blocks, and the order in which unused ones may be evicted."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, tuple[Hashable, ...]], Entry] = {}
        self._of: dict[int, Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._numbers = 0

    def __contains__(self, block: int) -> bool:
        """Whether the block is known."""
        return block in self._of

    @property
    def idle(self) -> Collection[int]:
        """The known blocks that no sequence uses, by their numbers."""
        return self._idle.keys()

    def chain(self, tokens: Sequence[Hashable]) -> Iterator[Entry]:
        """The known blocks at the beginning of a text, in order."""
        before = 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            entry = self._entries.get((before, tuple(tokens[start : start + BLOCK])))
            if entry is None:
                return
            yield entry
            before = entry.number

    def add(self, block: int, before: int, tokens: Sequence[Hashable]) -> Entry:
        """Add the block that follows entry ``before``; returns the existing entry if its text is known already."""
        key = (before, tuple(tokens))
        if key not in self._entries:
            self._numbers += 1
            self._entries[key] = self._of[block] = Entry(self._numbers, block, key)
        return self._entries[key]

    def rest(self, block: int) -> None:
        """Mark a known block as unused.

        Call it for the last block of a text first, so that no block is evicted before the ones that follow it.
        """
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """Mark a known block as used."""
        self._idle.pop(block, None)

    def give_up(self) -> Entry:
        """Evict the least recently used block; returns its entry."""
        block, _ = self._idle.popitem(last=False)
        entry = self._of.pop(block)
        del self._entries[entry.key]
        return entry
