"""Which blocks hold which text: found by content, and forgotten when they were not used for longest."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    """A block whose content is known.

    Attributes:
        number: Its own, never given twice.
        block: Where it stands.
        key: The number of the entry before it in the text (0 = it begins the text), and its tokens. What a block holds
            depends on all tokens before it, and these are compared one by one: no two texts are ever mistaken.
    """

    number: int
    block: int
    key: tuple[int, tuple[Hashable, ...]]


class BlockIndex:
    """The known blocks, and in which order those that nobody uses may be given up.

    Args:
        size: Tokens of a block.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[tuple[int, tuple[Hashable, ...]], Entry] = {}
        self._of: dict[int, Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._numbers = 0

    def __contains__(self, block: int) -> bool:
        """Whether the block is known."""
        return block in self._of

    @property
    def idle(self) -> Collection[int]:
        """Known blocks that nobody uses."""
        return self._idle.keys()

    def chain(self, tokens: Sequence[Hashable]) -> Iterator[Entry]:
        """The known blocks that a text begins with, in order."""
        before = 0
        for start in range(0, len(tokens) - self._size + 1, self._size):
            entry = self._entries.get((before, tuple(tokens[start : start + self._size])))
            if entry is None:
                return
            yield entry
            before = entry.number

    def add(self, block: int, before: int, tokens: Sequence[Hashable]) -> Entry:
        """Know the block that follows entry ``before``; the entry of another one where its text is known already."""
        key = (before, tuple(tokens))
        if key not in self._entries:
            self._numbers += 1
            self._entries[key] = self._of[block] = Entry(self._numbers, block, key)
        return self._entries[key]

    def rest(self, block: int) -> None:
        """Nobody uses a known block any more.

        Those of one text come last block first, so that no block is given up before the ones that follow it.
        """
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """Somebody uses a known block."""
        self._idle.pop(block, None)

    def give_up(self) -> int:
        """Forget the block that was not used for longest; it is free."""
        block, _ = self._idle.popitem(last=False)
        del self._entries[self._of.pop(block).key]
        return block
