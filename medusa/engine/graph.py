"""One decode step as one CUDA graph: launched as a whole, without Python or a wait between its kernels.

A graph repeats the kernels that it recorded, on the same memory. So shapes come in buckets: a power of two of requests
and a power of two of cached positions that attention reads at most. Requests at the end of a bucket may be inert: they
are padding, never grow, and write into a block that no text uses. The state is in fixed buffers of the bucket, and the
step itself updates it. The recorded function is ``verify`` of ``medusa.engine.step``, which eager steps run too.

The host is one step behind: it reads the tokens of a step while the next one runs. Chunks of prompts have separate
passes between the recorded steps.
"""

import dataclasses
import logging
import warnings
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from medusa.acceptance import Rule
from medusa.attention import TreePlan
from medusa.attention.contract import BlockTable
from medusa.base.model import BaseModel
from medusa.cache import BlockPool, CachedSequence, FixedTexts
from medusa.cache.follower import Followed, Follower
from medusa.drafters import Drafter
from medusa.engine.buckets import Bucket, Key, Latest, Record, Recorded, Replay
from medusa.engine.prefill import Chunk, advance
from medusa.engine.step import read_tokens, verify
from medusa.engine.steps import EagerSteps, Steps
from medusa.state import DecodeState

logger = logging.getLogger(__name__)

KEPT_GRAPHS = 8
"""Largest number of recorded steps of a bucket (pairs of a drafter and a rule); the least recently used is dropped."""
KEPT_BUCKETS = 8
"""Largest number of idle buckets that are kept; the one that was returned first is dropped."""
SHORTEST = 512
"""Cached positions of the smallest bucket."""
AHEAD = 2
"""Number of steps that are launched before the host waits for the tokens of the first."""


def cuda_recorder() -> Record:
    """Records CUDA graphs that share one memory pool, so only one of them may run at a time."""
    pool, kept = torch.cuda.graph_pool_handle(), list[torch.cuda.CUDAGraph]()

    def capture(function: Replay) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may allocate memory during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            function()
        return graph

    def record(function: Replay) -> Replay:
        if not kept:  # torch refuses a pool whose graphs were all freed: this one is as old as the recorder
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                kept.append(capture(lambda: None))
        return capture(function).replay

    return record


class StepGraphs:
    """Runs the steps of a base as graphs, and keeps recorded buckets from call to call.

    Args:
        base: Prepared for decoding.
        record: Records a step; None = as a CUDA graph.
    """

    def __init__(self, base: BaseModel, record: Record | None = None) -> None:
        self._base, self._given = base, record
        self._record = record or cuda_recorder()
        self._idle: list[Bucket] = []
        self._pool: BlockPool | None = None
        self._failed = False
        self._told: set[str] = set()

    @property
    def pool(self) -> BlockPool:
        """A KV cache that outlives a call, since recorded graphs keep its addresses; for one thread."""
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
        """Steps as graphs, or eager ones if they cannot be recorded; each reason is logged once."""
        reason = self._objection(base, sequences, drafter)
        if reason is None:
            return GraphSteps(self, base, sequences, drafter, rule, state)
        if reason not in self._told:
            logger.info("steps run eagerly: %s", reason)
            self._told.add(reason)
        return EagerSteps(base, sequences, drafter, rule, state)

    def clear(self) -> None:
        """Free the buckets, the pool and the graphs' memory that are kept between calls."""
        self._idle, self._pool = [], None
        self._record = self._given or cuda_recorder()

    def lend(self, pool: BlockPool, state: DecodeState, reach: int, key: Key, latest: Latest) -> Bucket:
        """A bucket for a state whose texts may reach ``reach`` positions in the next steps; it has one user at a time.

        An existing bucket that is not much too large is preferred to a new one, for which steps must be recorded. A
        bucket with a recording of this step comes first.
        """
        requests, kv_length = 1 << (len(state.roots) - 1).bit_length(), max(SHORTEST, 1 << (reach - 1).bit_length())
        for each in (pool, *(pool.beside(one) for one in latest)):
            each.tables.reach(-(-kv_length // each.size))
        self._idle = [one for one in self._idle if not one.stale]
        alike = [one for one in self._idle if one.pool is pool and one.followers == list(latest)]
        fitting = [one for one in alike if one.fits(state, requests, kv_length)]
        if not fitting:
            return Bucket(pool, state, latest, requests, kv_length)
        bucket = min(fitting, key=lambda one: (key not in one.recorded, one.requests, one.kv_length))
        self._idle.remove(bucket)
        return bucket

    def give_back(self, bucket: Bucket) -> None:
        """Return a bucket that is no longer used."""
        self._idle = [*self._idle, bucket][-KEPT_BUCKETS:]

    def record(self, function: Replay) -> Replay | None:
        """A function that repeats this one; None if recording does not work here, which is logged."""
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
        if base.decoding != "tree" or base.traits.explicit_mask:
            how = "gets its masks with each call" if base.traits.explicit_mask else "does not verify trees"
            return f"base ({base.name}) {how}"
        if base.recurrent:
            return f"base ({base.name}) has recurrent layers, whose states the host keeps"
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

    The first step of a drafter and a rule runs eagerly: kernels are compiled and memory is allocated. Then the step is
    recorded, which computes nothing, and every later step is a launch. If recording has failed, every step runs
    eagerly.

    Steps run ahead of the host by one: when a request ends, the next step already runs. The batch drops its tokens, and
    blocks are reserved for two steps at a time.
    """

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
        self._pool, self._state, self.places = sequences[0].pool, state, AHEAD * drafter.nodes
        # Requests with one drafter have the same observers.
        self._followers = [one for one in sequences[0].observers if isinstance(one, Follower)]
        self._bucket: Bucket | None = None
        self._under_way: deque[_Arrival] = deque()

    @property
    def sizes(self) -> Sequence[int]:
        """Shapes are fixed."""
        return [self._drafter.nodes] * len(self._sequences)

    @torch.inference_mode()
    def next(self, chunks: Sequence[Chunk] = ()) -> list[list[int]]:
        """The tokens of the oldest step under way; the next step is launched before the host waits for them."""
        if chunks:
            advance(self._base, chunks)
        while len(self._under_way) < AHEAD:
            self._launch()
        return self._arrive()

    @torch.inference_mode()
    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """Wait for the step under way, and copy the state out of the fixed buffers."""
        late = self._arrive() if self._under_way else None
        if self._bucket is not None:
            self._state = self._bucket.read(self._sequences)
            self._graphs.give_back(self._bucket)
            self._bucket = None
        return late, self._state

    def _arrive(self) -> list[list[int]]:
        tokens, counts = read_tokens(self._under_way.popleft().wait())
        for one, count in zip(self._sequences, counts, strict=False):  # inert requests come last
            one.length += count
        for ours, theirs in self._followed():
            ours.length = theirs.length
        return tokens[: len(self._sequences)]

    def _launch(self) -> None:
        """Launch the next step."""
        bucket, key = self._place(), self._key
        if key in bucket.recorded:
            bucket.recorded.move_to_end(key)
            bucket.recorded[key].replay()
            emitted = bucket.recorded[key].emitted
        else:
            emitted = self._step(bucket)
            self._record_step(bucket, key, emitted)
        self._under_way.append(_Arrival(emitted))

    def _record_step(self, bucket: Bucket, key: Key, like: Tensor) -> None:
        # Graphs share their memory, so the graph itself copies its result out of it.
        emitted = torch.empty_like(like)
        replay = self._graphs.record(lambda: emitted.copy_(self._step(bucket)))
        if replay is not None:
            bucket.recorded[key] = Recorded(replay, emitted)
        while len(bucket.recorded) > KEPT_GRAPHS:
            bucket.recorded.popitem(last=False)

    def _place(self) -> Bucket:
        """The bucket for the next step, with reserved blocks and the state; a new one if it is too small or stale."""
        for one in self._sequences:
            one.reserve(one.length + self.places)
        behind = self.places + self._drafter.places
        for ours, theirs in self._followed():
            ours.reserve(theirs.length + behind)
        reach, bucket = max(one.length for one in self._sequences) + behind, self._bucket
        if bucket is not None and (reach > bucket.kv_length or bucket.stale):
            self._state = bucket.read(self._sequences)  # a copy: others may use the bucket now
            self._graphs.give_back(bucket)
            bucket = None
        if bucket is None:
            latest = {follower: follower.read(self._sequences)[1] for follower in self._followers}
            bucket = self._bucket = self._graphs.lend(self._pool, self._state, reach, self._key, latest)
            bucket.load(self._state, self._sequences, latest)
        for pool in (self._pool, *(memory.pool for memory in bucket.memories)):
            pool.tables.tensor()  # copies the host's changes to the device
        return bucket

    def _followed(self) -> Iterator[tuple[CachedSequence, CachedSequence]]:
        """Pairs of a following layer's sequence and the base's sequence."""
        for follower in self._followers:
            yield from zip(follower.follow(self._sequences), self._sequences, strict=True)

    def _step(self, bucket: Bucket) -> Tensor:
        """One step that reads and updates the fixed state."""
        base, state = self._base, bucket.state
        table = BlockTable(self._pool.tables.tensor()[bucket.lines], self._pool.size)
        texts = FixedTexts(self._pool, table, state.positions, bucket.kv_length)
        followed: dict[Follower | None, Followed] = {None: Followed(texts, state.hidden)}
        followed |= {memory.follower: memory.part(state.positions, bucket.kv_length) for memory in bucket.memories}
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
    """A tensor that is being copied to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True, copy=True)  # from a GPU into pinned memory
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[list[int]]:
        """Wait for the copy; returns its numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[list[int]] = self._copy.tolist()
        return numbers
