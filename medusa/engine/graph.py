"""One decode step as one CUDA graph: launched as a whole, without Python or a wait between its kernels.

A graph repeats the kernels that it has seen, on the same memory. So shapes come in buckets: a power of two of requests,
the last of which may be inert (they belong to nobody, never grow, and write into a block that is nobody's), and a power
of two of places that attention reads at most. The state stands in fixed buffers of such a bucket, which the step itself
brings forward. What is recorded is ``verify`` of ``medusa.engine.step``, the function that eager steps run too, so that
is the measure of everything here.

The host is one step behind: it reads the tokens of a step while the next one runs. Chunks of prompts have passes of
their own beside the recorded steps.
"""

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.acceptance import Rule
from medusa.attention import TreePlan
from medusa.attention.contract import BlockTable
from medusa.base.model import BaseModel
from medusa.cache import BlockPool, CachedSequence, FixedTexts
from medusa.cache.follower import Followed, Follower
from medusa.drafters import Drafter
from medusa.engine.prefill import Chunk, advance
from medusa.engine.step import read_tokens, verify
from medusa.engine.steps import EagerSteps, Steps
from medusa.state import DecodeState

logger = logging.getLogger(__name__)

KEPT_GRAPHS = 8
"""Recorded steps of a bucket (pairs of a drafter and a rule); the one that was not used for longest goes."""
KEPT_BUCKETS = 8
"""Buckets that are kept while nobody uses them; likewise."""
SHORTEST = 512
"""Places of the smallest bucket."""
LARGER = 4
"""A bucket is used for so many times fewer requests, or shorter texts, than it has room for."""

Replay = Callable[[], object]
Record = Callable[[Replay], Replay]
"""Takes a function over fixed buffers that has run before; returns what does the same again.

Raises RuntimeError where it cannot be recorded, without having done anything to the buffers."""
Key = tuple[BaseModel, Drafter, Rule]
"""Of a recorded step."""
Latest = Mapping[Follower, Tensor]
"""Outputs [B, D] at the last rows of layers that follow the base."""
NOBODY: Latest = MappingProxyType({})


def cuda_recorder() -> Record:
    """Records CUDA graphs that share one pool of memory: only one of them may run at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
        return graph.replay

    return record


class _Recorded(NamedTuple):
    """A recorded step.

    Attributes:
        replay: Does it again.
        emitted: Where it leaves ``Accepted.emitted``.
    """

    replay: Replay
    emitted: Tensor


class _Memory(NamedTuple):
    """A layer that follows the base, in a bucket.

    Attributes:
        follower: The layer.
        pool: Its blocks.
        lines: [requests] int64, the line of each in that pool's table.
        latest: [requests, D] its outputs at the last rows.
    """

    follower: Follower
    pool: BlockPool
    lines: Tensor
    latest: Tensor

    def part(self, lengths_B: Tensor, kv_length: int) -> Followed:
        """Of a step, behind so many positions."""
        table = BlockTable(self.pool.tables.tensor()[self.lines], self.pool.size)
        return Followed(FixedTexts(self.pool, table, lengths_B, kv_length), self.latest)


class _Bucket:
    """Fixed buffers for so many requests, and what is recorded over them.

    Attributes:
        pool: Whose blocks the steps read.
        memories: Layers that follow.
        epochs: Of the pools when the buffers were made.
        kv_length: Places that attention reads at most.
        state: Of all requests, inert ones behind those that decode.
        lines: [requests] int64, the line of each in the pool's table.
        recorded: By drafter and rule.
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
            _Memory(one, pool.beside(one, one.new_pool), torch.zeros_like(self.lines), buffer(outputs))
            for one, outputs in latest.items()
        ]
        self.epochs = self._epochs()
        self.recorded: OrderedDict[Key, _Recorded] = OrderedDict()

    @property
    def requests(self) -> int:
        """How many, inert ones too."""
        return len(self.lines)

    @property
    def stale(self) -> bool:
        """Whether anything that is recorded over it has moved since."""
        return self.epochs != self._epochs()

    @property
    def followers(self) -> list[Follower]:
        """Layers that follow."""
        return [memory.follower for memory in self.memories]

    def _epochs(self) -> list[tuple[int, int]]:
        return [pool.epoch for pool in (self.pool, *(memory.pool for memory in self.memories))]

    def fits(self, state: DecodeState, requests: int, kv_length: int) -> bool:
        """Whether so many requests with so long texts have room here, and fill enough of it."""
        enough = requests <= self.requests <= LARGER * requests and kv_length <= self.kv_length <= LARGER * kv_length
        return enough and self.state.hidden.shape[1] == state.hidden.shape[1]

    def load(self, state: DecodeState, sequences: Sequence[CachedSequence], latest: Latest = NOBODY) -> None:
        """Take over a state, and what layers that follow have given last; whatever lies behind it becomes inert."""
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
        """The state of these, the first requests, which leaves the fixed buffers."""
        fields, count = dataclasses.fields(self.state), len(sequences)
        for memory in self.memories:
            memory.follower.resume(sequences, memory.latest[:count])
        return DecodeState(**{field.name: getattr(self.state, field.name)[:count].clone() for field in fields})


def _set_lines(buffer: Tensor, sequences: Sequence[CachedSequence]) -> None:
    """The lines of these sequences, and of nobody's behind them."""
    buffer[len(sequences) :] = 0
    buffer[: len(sequences)].copy_(torch.tensor([one.line for one in sequences]))


class StepGraphs:
    """Runs the steps of a base as graphs, and keeps the buckets that these are recorded over from call to call.

    Args:
        base: Prepared for decoding.
        record: How to record; None = as CUDA graphs.
    """

    def __init__(self, base: BaseModel, record: Record | None = None) -> None:
        self._base, self._record = base, record or cuda_recorder()
        self._idle: list[_Bucket] = []
        self._pool: BlockPool | None = None
        self._failed = False
        self._told: set[str] = set()

    @property
    def pool(self) -> BlockPool:
        """A KV cache that outlives a call, as what is recorded over it must; for one thread."""
        if self._pool is None:
            self._pool = self._base.new_pool()
        return self._pool

    def steps(
        self,
        base: BaseModel,
        sequences: Sequence[CachedSequence],
        drafter: Drafter,
        rule: Rule,
        state: DecodeState,
    ) -> Steps:
        """Steps as graphs, or eager ones where they cannot be recorded; why is logged once."""
        reason = self._objection(base, sequences, drafter)
        if reason is None:
            return GraphSteps(self, base, sequences, drafter, rule, state)
        if reason not in self._told:
            logger.info("steps run eagerly: %s", reason)
            self._told.add(reason)
        return EagerSteps(base, sequences, drafter, rule, state)

    def clear(self) -> None:
        """Free what is kept between calls."""
        self._idle, self._pool = [], None

    def lend(
        self,
        pool: BlockPool,
        state: DecodeState,
        reach: int,
        key: Key | None = None,
        latest: Latest = NOBODY,
    ) -> _Bucket:
        """Buffers for a state whose texts may reach so far in the next steps; two users never share them.

        Some that are there already, and not much too large, come before new ones, for which steps must be recorded;
        those over which this step is recorded come first.
        """
        requests, kv_length = 1 << (len(state.roots) - 1).bit_length(), max(SHORTEST, 1 << (reach - 1).bit_length())
        for each in (pool, *(pool.beside(one, one.new_pool) for one in latest)):
            each.tables.reach(-(-kv_length // each.size))
        self._idle = [one for one in self._idle if not one.stale]
        alike = [one for one in self._idle if one.pool is pool and one.followers == list(latest)]
        fitting = [one for one in alike if one.fits(state, requests, kv_length)]
        if not fitting:
            return _Bucket(pool, state, latest, requests, kv_length)
        bucket = min(fitting, key=lambda one: (key not in one.recorded, one.requests, one.kv_length))
        self._idle.remove(bucket)
        return bucket

    def give_back(self, bucket: _Bucket) -> None:
        """Nobody uses it any more."""
        self._idle = [*self._idle, bucket][-KEPT_BUCKETS:]

    def record(self, function: Replay) -> Replay | None:
        """What does the same again; None where recording does not work here, which is logged."""
        if self._failed:
            return None
        try:
            return self._record(function)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failed = True
            logger.warning("steps run eagerly from now on, because recording one as a graph failed: %s", error)
            return None

    def _objection(self, base: BaseModel, sequences: Sequence[CachedSequence], drafter: Drafter) -> str | None:
        if self._failed:
            return "recording failed before"
        if base.decoding != "tree" or base.explicit_mask:
            how = "gets its masks with each call" if base.explicit_mask else "does not verify trees"
            return f"base ({base.name}) {how}"
        if not all(isinstance(observer, Follower) for one in sequences for observer in one.observers):
            return "a layer that drafts needs the host in each step to read hidden states"
        if not base.attention.recordable:
            return f"attention ({base.attention.name}) reads lengths on the host here"
        if not drafter.recordable:
            return f"drafter ({type(drafter).__name__}) is not recordable, or does not say that it is"
        devices = {parameter.device for parameter in base.model.parameters()}
        return None if len(devices) == 1 else f"base ({base.name}) is spread over {len(devices)} devices"


class GraphSteps:
    """``Steps`` as graphs over the buffers of a bucket, which may have been recorded in an earlier call.

    The first step of a drafter and a rule runs eagerly: kernels are compiled and memory is allocated. Then it is
    recorded, which computes nothing, and every further one is a launch. Where there is nothing to launch because
    recording has failed, every step is like the first.

    Steps run ahead of the host by one: when a request ends, the next step is already on its way. Its tokens are
    dropped by the batch, and blocks are taken for two steps at a time.
    """

    ahead = 2

    def __init__(
        self,
        graphs: StepGraphs,
        base: BaseModel,
        sequences: Sequence[CachedSequence],
        drafter: Drafter,
        rule: Rule,
        state: DecodeState,
    ) -> None:
        self._graphs, self._base, self._sequences, self._drafter, self._rule = graphs, base, sequences, drafter, rule
        self._key = base, drafter, rule
        self._pool, self._state = sequences[0].pool, state
        # Requests of one drafter are observed by the same layers.
        self._followers = [one for one in sequences[0].observers if isinstance(one, Follower)]
        self._bucket: _Bucket | None = None
        self._under_way: deque[_Arrival] = deque()

    @property
    def sizes(self) -> Sequence[int]:
        """Shapes are fixed."""
        return [self._drafter.nodes] * len(self._sequences)

    @torch.inference_mode()
    def next(self, chunks: Sequence[Chunk] = ()) -> list[list[int]]:
        """The tokens of the oldest step under way; another one is sent on its way before they are waited for."""
        if chunks:
            advance(self._base, chunks)
        while len(self._under_way) < self.ahead:
            self._launch()
        return self._arrive()

    @torch.inference_mode()
    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """The step under way is waited for, and the state leaves the fixed buffers."""
        late = self._arrive() if self._under_way else None
        if self._bucket is not None:
            self._state = self._bucket.read(self._sequences)
            self._graphs.give_back(self._bucket)
            self._bucket = None
        return late, self._state

    def _arrive(self) -> list[list[int]]:
        tokens, counts = read_tokens(self._under_way.popleft().wait())
        for one, count in zip(self._sequences, counts, strict=False):  # inert ones stand behind
            one.length += count
        for ours, theirs in self._followed():
            ours.length = theirs.length
        return tokens[: len(self._sequences)]

    def _launch(self) -> None:
        """Send the next step on its way."""
        bucket, key = self._place(), self._key
        if key in bucket.recorded:
            bucket.recorded.move_to_end(key)
            bucket.recorded[key].replay()
            emitted = bucket.recorded[key].emitted
        else:
            emitted = self._step(bucket)
            self._record_step(bucket, key, emitted)
        self._under_way.append(_Arrival(emitted))

    def _record_step(self, bucket: _Bucket, key: Key, like: Tensor) -> None:
        # Graphs share their memory: what outlives a replay is copied out of it, by the graph itself.
        emitted = torch.empty_like(like)
        replay = self._graphs.record(lambda: emitted.copy_(self._step(bucket)))
        if replay is not None:
            bucket.recorded[key] = _Recorded(replay, emitted)
        while len(bucket.recorded) > KEPT_GRAPHS:
            bucket.recorded.popitem(last=False)

    def _place(self) -> _Bucket:
        """Buffers with blocks for the next step, with the state in them; others where these are too small or stale."""
        behind = self.ahead * self._drafter.nodes
        for one in self._sequences:
            one.reserve(one.length + behind)
        behind += self._drafter.places
        for ours, theirs in self._followed():
            ours.reserve(theirs.length + behind)
        reach, bucket = max(one.length for one in self._sequences) + behind, self._bucket
        if bucket is not None and (reach > bucket.kv_length or bucket.stale):
            self._state = bucket.read(self._sequences)  # where kept, others may write there from now on
            self._graphs.give_back(bucket)
            bucket = None
        if bucket is None:
            latest = {follower: follower.read(self._sequences)[1] for follower in self._followers}
            bucket = self._bucket = self._graphs.lend(self._pool, self._state, reach, self._key, latest)
            bucket.load(self._state, self._sequences, latest)
        for pool in (self._pool, *(memory.pool for memory in bucket.memories)):
            pool.tables.tensor()  # what the host has changed goes to where it is read
        return bucket

    def _followed(self) -> Iterator[tuple[CachedSequence, CachedSequence]]:
        """The sequences of layers that follow, each with the base's."""
        for follower in self._followers:
            yield from zip(follower.follow(self._sequences), self._sequences, strict=True)

    def _step(self, bucket: _Bucket) -> Tensor:
        """One step from the fixed state to the fixed state."""
        base, state = self._base, bucket.state
        table = BlockTable(self._pool.tables.tensor()[bucket.lines], self._pool.size)
        followed = {memory.follower: memory.part(state.positions, bucket.kv_length) for memory in bucket.memories}
        draft = self._drafter.propose(state, followed)
        plan = TreePlan([draft], state.positions, bucket.kv_length, table, base.attention, base.spans)
        accepted, hidden_BNF, after = verify(base, self._pool, plan, self._rule, state)
        for memory in bucket.memories:
            part, path_BAF = followed[memory.follower], accepted.along_path(hidden_BNF)
            memory.latest.copy_(memory.follower.advance(part, path_BAF, accepted.tokens, accepted.counts))
        for field in dataclasses.fields(state):
            getattr(state, field.name).copy_(getattr(after, field.name))
        return accepted.emitted


class _Arrival:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True, copy=True)  # from a GPU into pinned memory
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[list[int]]:
        """Its numbers, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[list[int]] = self._copy.tolist()
        return numbers
