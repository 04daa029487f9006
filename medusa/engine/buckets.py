"""Fixed memory for recorded steps, for a number of requests and of cached positions."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.acceptance import Rule
from medusa.attention.contract import BlockTable
from medusa.base.model import BaseModel
from medusa.cache import BlockPool, CachedSequence, FixedTexts
from medusa.cache.follower import Followed, Follower
from medusa.drafters import Drafter
from medusa.state import DecodeState

LARGER = 4
"""A bucket may be this many times larger than needed, in requests and in positions."""

Replay = Callable[[], object]
Record = Callable[[Replay], Replay]
"""Takes a function over fixed buffers that has run before; returns a function that repeats it.

Raises RuntimeError if it cannot be recorded; the buffers are unchanged then."""
Key = tuple[BaseModel, Drafter, Rule]
"""Identifies a recorded step."""
Latest = Mapping[Follower, Tensor]
"""Outputs [B, D] at the last positions, for each layer that follows the base."""


class Recorded(NamedTuple):
    """A recorded step.

    Attributes:
        replay: Repeats the step.
        emitted: The buffer that receives ``Accepted.emitted``.
    """

    replay: Replay
    emitted: Tensor


class Memory(NamedTuple):
    """The buffers of a layer that follows the base, in a bucket.

    Attributes:
        follower: The layer.
        pool: Its blocks.
        lines: [requests] int64, the line of each request in that pool's table.
        latest: [requests, D] outputs of the layer at the last positions.
    """

    follower: Follower
    pool: BlockPool
    lines: Tensor
    latest: Tensor

    def part(self, lengths_B: Tensor, kv_length: int) -> Followed:
        """The layer's part of a step, behind ``lengths_B`` cached positions."""
        table = BlockTable(self.pool.tables.tensor()[self.lines], self.pool.size)
        return Followed(FixedTexts(self.pool, table, lengths_B, kv_length), self.latest)


class Bucket:
    """Fixed buffers for a number of requests, and the steps recorded over them.

    Attributes:
        pool: The pool whose blocks the steps read.
        memories: Buffers of the layers that follow the base.
        epochs: Epochs of the pools when the buffers were made.
        kv_length: Largest number of cached positions that attention reads.
        state: The state of all requests; inert ones come last.
        lines: [requests] int64, the line of each request in the pool's table.
        recorded: Recorded steps by base, drafter and rule.
    """

    def __init__(self, pool: BlockPool, like: DecodeState, latest: Latest, requests: int, kv_length: int) -> None:
        def buffer(tensor: Tensor) -> Tensor:
            return tensor.new_zeros(requests, *tensor.shape[1:])

        self.pool, self.kv_length = pool, kv_length
        tensors = {field.name: buffer(getattr(like, field.name)) for field in dataclasses.fields(like)}
        tensors["history"] = like.history.new_zeros(requests, kv_length + 1)
        self.state = DecodeState(**tensors)
        self.lines = torch.zeros_like(tensors["roots"])
        self.memories = [
            Memory(one, pool.beside(one), torch.zeros_like(self.lines), buffer(outputs))
            for one, outputs in latest.items()
        ]
        self.epochs = self._epochs()
        self.recorded: OrderedDict[Key, Recorded] = OrderedDict()

    @property
    def requests(self) -> int:
        """Number of requests, inert ones included."""
        return len(self.lines)

    @property
    def stale(self) -> bool:
        """Whether memory of the pools has moved since the steps were recorded."""
        return self.epochs != self._epochs()

    @property
    def followers(self) -> list[Follower]:
        """The layers that follow the base."""
        return [memory.follower for memory in self.memories]

    def _epochs(self) -> list[tuple[int, int]]:
        return [pool.epoch for pool in (self.pool, *(memory.pool for memory in self.memories))]

    def fits(self, state: DecodeState, requests: int, kv_length: int) -> bool:
        """Whether this many requests with texts of this length fit, and fill enough of the bucket."""
        enough = requests <= self.requests <= LARGER * requests and kv_length <= self.kv_length <= LARGER * kv_length
        return enough and self.state.hidden.shape[1] == state.hidden.shape[1]

    def load(self, state: DecodeState, sequences: Sequence[CachedSequence], latest: Latest) -> None:
        """Copy a state and the latest outputs of following layers into the buffers; the other requests become inert."""
        count = len(sequences)
        for field in dataclasses.fields(state):
            ours, theirs = getattr(self.state, field.name), getattr(state, field.name)
            if field.name == "history":
                theirs = theirs[:, : ours.shape[1]]
                ours[:count, : theirs.shape[1]].copy_(theirs)
            else:
                ours[count:] = 0
                ours[:count].copy_(theirs)
        _set_lines(self.lines, sequences)
        for memory in self.memories:
            _set_lines(memory.lines, memory.follower.follow(sequences))
            memory.latest[:count].copy_(latest[memory.follower])

    def read(self, sequences: Sequence[CachedSequence]) -> DecodeState:
        """Copy the state of these sequences, the first of the bucket, out of the fixed buffers."""
        fields, count = dataclasses.fields(self.state), len(sequences)
        for memory in self.memories:
            memory.follower.resume(sequences, memory.latest[:count])
        return DecodeState(**{field.name: getattr(self.state, field.name)[:count].clone() for field in fields})


def _set_lines(buffer: Tensor, sequences: Sequence[CachedSequence]) -> None:
    """Write the lines of these sequences; inert requests behind them get line 0."""
    buffer[len(sequences) :] = 0
    buffer[: len(sequences)].copy_(torch.tensor([one.line for one in sequences]))
