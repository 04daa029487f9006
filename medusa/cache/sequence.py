"""The cached keys and values of one text; plan and commit of a step over several."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from medusa import gpu
from medusa.attention.contract import BlockTable, TreeAttention, TreePlan
from medusa.attention.spans import Span
from medusa.cache.pool import Beside, BlockPool
from medusa.cpu import native
from medusa.tree import Draft


class Observer(Beside, Protocol):
    """A layer with its own cache that reads the base's hidden states, see ``Follower``."""

    def observe(
        self, sequences: "Sequence[CachedSequence]", hidden_BCF: Tensor, tokens_BC: Tensor, counts: Sequence[int]
    ) -> None:
        """See ``Follower.observe``."""


class CachedSequence:
    """One text's blocks of a pool: position p is place p % BLOCK of its block p // BLOCK.

    Blocks in the index (``remember``) are full of committed positions and never written again, so sequences share them
    without a copy. The blocks return to the pool with ``close``, or when the object is deleted.

    Args:
        pool: The pool of its keys and values.
        observers: Layers that read the hidden states of all committed positions.

    Attributes:
        length: L, number of committed positions. No other variable on the host keeps this number.
        line: Its line in the pool's table.
        followers: The same text in other models' pools (draft models, layers that predict several tokens), by model.
    """

    def __init__(self, pool: BlockPool, observers: Sequence[Observer] = ()) -> None:
        self.pool, self.length, self.observers = pool, 0, tuple(observers)
        self.followers: dict[Beside, CachedSequence] = {}
        self._blocks: list[int] = []
        self._entries: list[int] = []  # numbers of the index entries of its first blocks, which others can find
        self.line = pool.tables.open()
        self._close = weakref.finalize(self, _release, pool, self._blocks, self.line)
        self._close.atexit = False

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet."""
        return not self._blocks

    @property
    def unknown(self) -> bool:
        """Whether it has full blocks that others cannot find yet."""
        return self.length // self.pool.size > len(self._entries)

    def recall(self, tokens: Sequence[int]) -> int:
        """Begin with the full blocks of this text that the index knows; returns their number of positions.

        Positions that observers do not know must be computed again.
        """
        assert not self._blocks, "recalled before anything is written"
        chain = self.pool.find(tokens, self.pool.known(tokens, self.observers))
        self._blocks += [entry.block for entry in chain]
        self._entries += [entry.number for entry in chain]
        self.pool.tables.write(self.line, 0, self._blocks)
        self.length = len(self._blocks) * self.pool.size
        if self._entries:
            self.pool.recurrent.begin(self.line, self._entries[-1])
        for observer in self.observers:
            self.follower(observer).recall(tokens[: self.length + 1])
        return self.length

    def missing(self, places: int) -> int:
        """Number of blocks that it lacks for ``places`` positions."""
        return max(0, -(-places // self.pool.size) - len(self._blocks))

    def reserve(self, places: int) -> None:
        """Reserve blocks for ``places`` positions.

        Raises:
            PoolFullError: There are no blocks left.
        """
        missing = self.missing(places)
        if missing > 0:
            new = self.pool.take(missing)
            self.pool.tables.write(self.line, len(self._blocks), new)
            self._blocks += new

    def remember(self, tokens: Sequence[int]) -> None:
        """Add its committed blocks, and those of followers, to the index; its text begins with these tokens."""
        size, content = self.pool.size, self.pool.content(tokens)
        for index in range(len(self._entries), min(len(content), self.length) // size):
            before = self._entries[-1] if self._entries else 0
            entry = self.pool.add(self._blocks[index], before, content[index * size : (index + 1) * size])
            self._entries.append(entry.number)
            if entry.block != self._blocks[index]:
                self._blocks[index] = entry.block
                self.pool.tables.write(self.line, index, [entry.block])
        if self._entries:
            self.pool.recurrent.save(self.line, len(self._entries) * size, self._entries[-1])
        for follower in self.followers.values():
            follower.remember(tokens)

    def follower(self, model: Beside) -> "CachedSequence":
        """The same text in another model's pool; empty at first, and closed with this one."""
        if model not in self.followers:
            self.followers[model] = CachedSequence(self.pool.beside(model))
        return self.followers[model]

    def close(self) -> None:
        """Release all blocks; the sequence must not be used afterwards."""
        for follower in self.followers.values():
            follower.close()
        self.followers = {}
        self._close()


def _release(pool: BlockPool, blocks: list[int], line: int) -> None:
    pool.release(blocks)
    blocks.clear()
    pool.recurrent.drop(line)
    pool.tables.close(line)


@contextmanager
def provisional(sequences: Sequence[CachedSequence]) -> Iterator[None]:
    """A context after which positions committed within it are forgotten."""
    lengths = [one.length for one in sequences]
    with ExitStack() as stack:
        for one in sequences:
            stack.enter_context(one.pool.recurrent.provisional(one.line))
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
    """Plan a pass over trees behind the cached parts of these sequences; reserves blocks for it.

    Args:
        parts: Trees with the sequences that they continue, all of one pool.
        attention: The attention backend.
        spans: Windows and chunks by layer.
        kv_length: Number of positions that attention reads; None = those of the longest sequence.
        lengths_B: [B] int64 lengths of the first part's sequences, if they are on the device already.
        computed: Number of nodes of each tree that earlier passes have computed.
        ahead: Offset of the roots from the first position that is not cached.

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
    plan = TreePlan([draft for draft, _ in parts], lengths_B, kv_length or max(ends), table, attention, spans, computed)
    plan.texts = [(one.line, length) for one, length in zip(sequences, lengths, strict=True)]
    return plan


def commit(pool: BlockPool, table_SW: Tensor, lengths_S: Tensor, path_SA: Tensor, counts_S: Tensor) -> None:
    """Move the keys and values of accepted paths to the ends of their texts; the caller updates the lengths.

    Args:
        pool: The pool of all sequences.
        table_SW: Their blocks.
        lengths_S: int64 committed positions before this step.
        path_SA: int64 nodes of the accepted paths from the root on; entry i is at least i, and i itself beyond a path's
            end.
        counts_S: int64 number of nodes of each path.
    """
    read = native.reads_indices(path_SA)
    if read and not _any_moves(path_SA, counts_S):
        return
    buffers = pool.buffers
    if read and all(buffer.device.type == "cpu" for buffer in buffers):
        native.keep_rows(buffers, path_SA, counts_S, lengths_S, table_SW, pool.size)
        return
    first_S1, offsets_A = lengths_S[:, None], torch.arange(path_SA.shape[1], device=path_SA.device)
    table = BlockTable(table_SW, pool.size)
    sources_SA, targets_SA = table.places(first_S1 + path_SA), table.places(first_S1 + offsets_A)
    if buffers[0].is_cuda and (moves := gpu.module("moves")) is not None and moves.fits(buffers):
        moves.move_rows(buffers, pool.addresses(), sources_SA, targets_SA)
        return
    sources, targets = sources_SA.flatten(), targets_SA.flatten()
    for device in {buffer.device for buffer in buffers}:
        there, here = sources.to(device), targets.to(device)
        for rows in (buffer.flatten(0, 1) for buffer in buffers if buffer.device == device):
            rows.index_copy_(0, here, rows.index_select(0, there))


def _any_moves(path_SA: Tensor, counts_S: Tensor) -> bool:
    """Whether any node of these paths must move; on a CPU this check is free."""
    pairs = zip(path_SA.tolist(), counts_S.tolist(), strict=True)
    return any(node != place for path, count in pairs for place, node in enumerate(path[:count]))
