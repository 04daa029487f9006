"""The cached keys and values of one text, and what a step does with those of several."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from medusa.attention.contract import BlockTable, TreeAttention, TreePlan
from medusa.attention.spans import Span
from medusa.cache.pool import BlockPool
from medusa.cpu import native
from medusa.tree import Draft


class Observer(Protocol):
    """A layer whose own cache follows the base's, and that reads its hidden states: see ``Follower``."""

    def new_pool(self) -> BlockPool:
        """An empty cache of its own."""

    def observe(
        self, sequences: "Sequence[CachedSequence]", hidden_BCF: Tensor, tokens_BC: Tensor, counts: Sequence[int]
    ) -> None:
        """See what the base has committed."""


class CachedSequence:
    """One text's blocks of a pool: position p is place p % BLOCK of its block p // BLOCK.

    Blocks that others know (``remember``) are full of committed positions and never written again, so that sequences
    share them without a copy. What it holds goes back to the pool with ``close``, or when it is dropped.

    Args:
        pool: Where its keys and values stand.
        observers: Who must see the hidden states of all that is committed.

    Attributes:
        length: L, committed positions. The only place on the host where this number is kept.
        line: Its line of the pool's table.
        followers: The same text in other models' pools (draft models, layers that predict several tokens), by model.
    """

    def __init__(self, pool: BlockPool, observers: Sequence[Observer] = ()) -> None:
        self.pool, self.length, self.observers = pool, 0, tuple(observers)
        self.followers: dict[object, CachedSequence] = {}
        self._blocks: list[int] = []
        self._entries: list[int] = []  # numbers of the index entries of those that others can find: the first ones
        self.line = pool.tables.open()
        self._close = weakref.finalize(self, _release, pool, self._blocks, self.line)
        self._close.atexit = False

    @property
    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self._blocks

    @property
    def unknown(self) -> bool:
        """Whether it has full blocks that others cannot find yet."""
        return self.length // self.pool.size > len(self._entries)

    def recall(self, tokens: Sequence[int]) -> int:
        """Begin with what is known of this text already, whole blocks; returns how many positions that is.

        What observers do not know of it must be computed again.
        """
        assert not self._blocks, "recalled before anything is written"
        chain = self.pool.find(tokens, self.pool.known(tokens, self.observers))
        self._blocks += [entry.block for entry in chain]
        self._entries += [entry.number for entry in chain]
        self.pool.tables.write(self.line, 0, self._blocks)
        self.length = len(self._blocks) * self.pool.size
        for observer in self.observers:
            self.follower(observer, observer.new_pool).recall(tokens[: self.length + 1])
        return self.length

    def missing(self, places: int) -> int:
        """Blocks that it lacks for so many places."""
        return max(0, -(-places // self.pool.size) - len(self._blocks))

    def reserve(self, places: int) -> None:
        """Have blocks for so many places.

        Raises:
            PoolFullError: There are none left.
        """
        missing = self.missing(places)
        if missing > 0:
            new = self.pool.take(missing)
            self.pool.tables.write(self.line, len(self._blocks), new)
            self._blocks += new

    def remember(self, tokens: Sequence[int]) -> None:
        """Let later sequences recall its committed blocks, and followers'; its text begins with these tokens."""
        size, content = self.pool.size, self.pool.content(tokens)
        for index in range(len(self._entries), min(len(content), self.length) // size):
            before = self._entries[-1] if self._entries else 0
            entry = self.pool.add(self._blocks[index], before, content[index * size : (index + 1) * size])
            self._entries.append(entry.number)
            if entry.block != self._blocks[index]:
                self._blocks[index] = entry.block
                self.pool.tables.write(self.line, index, [entry.block])
        for follower in self.followers.values():
            follower.remember(tokens)

    def follower(self, model: object, build: Callable[[], BlockPool]) -> "CachedSequence":
        """The same text as another model has cached it, empty at first; it goes with this one.

        Args:
            model: Whose it is.
            build: A pool of that model's, which all followers of this pool's sequences share.
        """
        if model not in self.followers:
            self.followers[model] = CachedSequence(self.pool.beside(model, build))
        return self.followers[model]

    def close(self) -> None:
        """Give everything back; the sequence may not be used any more."""
        for follower in self.followers.values():
            follower.close()
        self.followers = {}
        self._close()


def _release(pool: BlockPool, blocks: list[int], line: int) -> None:
    pool.release(blocks)
    blocks.clear()
    pool.tables.close(line)


@contextmanager
def provisional(sequences: Sequence[CachedSequence]) -> Iterator[None]:
    """Forget at the end what is committed from now on."""
    lengths = [one.length for one in sequences]
    try:
        yield
    finally:
        for one, length in zip(sequences, lengths, strict=True):
            one.length = length


def plan_pass(
    parts: Sequence[tuple[Draft, Sequence[CachedSequence]]],
    attention: TreeAttention,
    spans: Mapping[int | None, Span] | None = None,
    kv_length: int | None = None,
    lengths_B: Tensor | None = None,
    computed: int = 0,
    ahead: int = 0,
) -> TreePlan:
    """The plan of a pass over trees behind what is cached of these sequences; blocks for it are taken.

    Args:
        parts: Trees, each with the sequences that they go on from, all of one pool.
        attention: Who computes.
        spans: Windows and chunks by layer.
        kv_length: Places that attention reads; None = as far as the longest sequence reaches.
        lengths_B: [B] int64 the lengths of the first part's sequences, where they are on the device already.
        computed: Nodes of each tree that earlier passes have computed.
        ahead: Where the roots stand, from the first position that is not cached on.

    Raises:
        PoolFullError: There are no blocks left.
    """
    sequences = [one for _, ones in parts for one in ones]
    sizes, pool = [size for draft, _ in parts for size in draft.row_sizes], sequences[0].pool
    lengths = [one.length + ahead for one in sequences]
    ends = [length + size for length, size in zip(lengths, sizes, strict=True)]
    for one, end in zip(sequences, ends, strict=True):
        one.reserve(end)
    table = BlockTable(pool.tables.of([one.line for one in sequences]), pool.size)
    known = 0 if lengths_B is None else lengths_B.shape[0]
    if known < len(lengths):
        behind = torch.tensor(lengths[known:], device=pool.device)
        lengths_B = behind if lengths_B is None else torch.cat([lengths_B, behind])
    assert lengths_B is not None, "there are sequences"
    return TreePlan([draft for draft, _ in parts], lengths_B, kv_length or max(ends), table, attention, spans, computed)


def commit(pool: BlockPool, table_SW: Tensor, lengths_S: Tensor, path_SA: Tensor, counts_S: Tensor) -> None:
    """Move the keys and values of accepted paths to where their texts end; ``CachedSequence.length`` is the caller's.

    Args:
        pool: Of all sequences.
        table_SW: Their blocks.
        lengths_S: int64 committed positions before.
        path_SA: int64 nodes of the accepted paths from the root on; none stands before its place in the path, and entry
            i beyond a path's end is i itself.
        counts_S: int64 nodes of each path.
    """
    buffers = [buffer for arena in pool.arenas for buffer in arena.buffers]
    if native.reads_indices(path_SA) and all(buffer.device.type == "cpu" for buffer in buffers):
        if _any_moves(path_SA, counts_S):
            native.keep_rows(buffers, path_SA, counts_S, lengths_S, table_SW, pool.size)
        return
    first_S1, offsets_A = lengths_S[:, None], torch.arange(path_SA.shape[1], device=path_SA.device)
    table = BlockTable(table_SW, pool.size)
    sources, targets = (table.places(first_S1 + nodes).flatten() for nodes in (path_SA, offsets_A))
    for device in {buffer.device for buffer in buffers}:
        there, here = sources.to(device), targets.to(device)
        for rows in (buffer.flatten(0, 1) for buffer in buffers if buffer.device == device):
            rows.index_copy_(0, here, rows.index_select(0, there))


def _any_moves(path_SA: Tensor, counts_S: Tensor) -> bool:
    """Whether any node of these paths does not stand at its place already; on a CPU asking is free."""
    pairs = zip(path_SA.tolist(), counts_S.tolist(), strict=True)
    return any(node != place for path, count in pairs for place, node in enumerate(path[:count]))
