"""One decode step as one CUDA graph: launched as a whole, without Python or a wait between its kernels.

A graph repeats the kernels that it has seen, on the same memory. So the state stands in fixed buffers, which the step
itself brings forward; attention reads every row of the cache up to its capacity; and what was recorded belongs to these
buffers, to a drafter and to a rule. What is recorded is ``step_on_device``, the same function that ``decode_step`` runs
eagerly, so that is the measure of everything here.

The host is one step behind: it reads the tokens of a step while the next one runs.
"""

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.acceptance import Rule
from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.drafters import Drafter
from medusa.engine.prefill import Prefill, advance
from medusa.engine.step import read_tokens, step_on_device
from medusa.engine.steps import EagerSteps, Steps
from medusa.state import DecodeState

logger = logging.getLogger(__name__)

KEPT_GRAPHS = 8
"""Recorded steps per cache (pairs of a drafter and a rule); the one that was not used for longest goes."""
KEPT_CACHES = 4
"""Idle caches, one per batch size; likewise."""

Replay = Callable[[], object]
Record = Callable[[Replay], Replay]
"""Takes a function over fixed buffers that has run before; returns what does the same again.

Raises RuntimeError where it cannot be recorded, without having done anything to the buffers."""


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


class StepGraphs:
    """Runs the steps of a base as graphs, and keeps the caches that these are recorded over from call to call.

    Args:
        base: Prepared for decoding.
        record: How to record; None = as CUDA graphs.
    """

    def __init__(self, base: BaseModel, record: Record | None = None) -> None:
        self._base, self._record = base, record or cuda_recorder()
        self._idle: OrderedDict[int, SlotCache] = OrderedDict()
        self._failed = False
        self._told: set[str] = set()

    def over(self, base: BaseModel) -> "StepGraphs":
        """The same for another base, whose states may have other shapes: with caches and recordings of its own."""
        return self if base is self._base else StepGraphs(base, self._record)

    def steps(self, base: BaseModel, cache: SlotCache, drafter: Drafter, rule: Rule, state: DecodeState) -> Steps:
        """Steps as graphs, or eager ones where they cannot be recorded; why is logged once."""
        reason = self._objection(base, drafter)
        if cache.observers:
            reason = "multi-token prediction reads each step's hidden states on the host's account"
        if reason is None:
            return GraphSteps(base, cache, drafter, rule, state, self._try_to_record)
        if reason not in self._told:
            logger.info("steps run eagerly: %s", reason)
            self._told.add(reason)
        return EagerSteps(base, cache, drafter, rule, state)

    @contextmanager
    def lend(self, slots: int, rows: int, limit: int) -> Generator[SlotCache]:
        """An empty cache, the one of the last call of this batch size where it is idle: two calls never share one.

        It comes back when the completions have ended or are given up between two steps, but not after an error.

        Args:
            slots: Sequences that will join.
            rows: Rows per slot at the start.
            limit: Rows per slot at most. Both are rounded up to powers of two, so that calls of similar lengths find
                buffers that need not move.
        """
        rows, limit = (1 << (count - 1).bit_length() for count in (rows, limit))
        cache = self._idle.pop(slots, None)
        if cache is None:
            cache = self._base.new_cache(slots, rows, limit)
        cache.clear()
        cache.limit = max(limit, cache.capacity)
        cache.reserve(rows)
        try:
            yield cache
        except GeneratorExit:
            self._keep(slots, cache)
            raise
        self._keep(slots, cache)

    def clear(self) -> None:
        """Free idle caches and what was recorded over them."""
        self._idle.clear()

    def _keep(self, slots: int, cache: SlotCache) -> None:
        self._idle[slots] = cache
        self._idle.move_to_end(slots)
        while len(self._idle) > KEPT_CACHES:
            self._idle.popitem(last=False)

    def _objection(self, base: BaseModel, drafter: Drafter) -> str | None:
        if self._failed:
            return "recording failed before"
        if base.decoding != "tree" or base.explicit_mask:
            how = "gets its masks with each call" if base.explicit_mask else "does not verify trees"
            return f"base ({base.name}) {how}"
        if not base.attention.recordable:
            return f"attention ({base.attention.name}) reads lengths on the host here"
        if not drafter.recordable:
            return f"drafter ({type(drafter).__name__}) is not recordable: the host decides shapes, or it does not say"
        devices = {parameter.device for parameter in base.model.parameters()}
        return None if len(devices) == 1 else f"base ({base.name}) is spread over {len(devices)} devices"

    def _try_to_record(self, function: Replay) -> Replay | None:
        if self._failed:
            return None
        try:
            return self._record(function)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failed = True
            logger.warning("steps run eagerly from now on, recording one as a graph has failed: %s", error)
            return None


class _Recorded(NamedTuple):
    """A recorded step.

    Attributes:
        replay: Does it again.
        emitted: Where it leaves what ``step_on_device`` returns.
    """

    replay: Replay
    emitted: Tensor


_RecordedSteps = OrderedDict[tuple[Drafter, Rule], _Recorded]


class _Buffers:
    """What has a fixed place beside the rows of a cache: the state, and what is recorded over both."""

    def __init__(self, state: DecodeState, capacity: int) -> None:
        tensors = {field.name: torch.empty_like(getattr(state, field.name)) for field in dataclasses.fields(state)}
        tensors["history"] = state.history.new_zeros(len(state.history), capacity + 1)
        self.state = DecodeState(**tensors)
        self.recorded: _RecordedSteps = OrderedDict()

    def load(self, state: DecodeState) -> None:
        """Take over a state whose history is not wider than the capacity."""
        for field in dataclasses.fields(state):
            ours, theirs = getattr(self.state, field.name), getattr(state, field.name)
            ours[..., : theirs.shape[-1]].copy_(theirs)


class GraphSteps:
    """``Steps`` as graphs over the buffers of one cache, which may have been recorded in an earlier call.

    The first step of a drafter and a rule runs eagerly: kernels are compiled and memory is allocated. Then it is
    recorded, which computes nothing, and every further one is a launch. Where there is nothing to launch because
    recording has failed, every step is like the first.

    Steps run ahead of the host by one: when a sequence ends, the next step is already on its way. Its tokens are
    dropped here, and room is made for two steps at a time.
    """

    def __init__(
        self,
        base: BaseModel,
        cache: SlotCache,
        drafter: Drafter,
        rule: Rule,
        state: DecodeState,
        record: Callable[[Replay], Replay | None],
    ) -> None:
        self._base, self._cache, self._drafter, self._rule = base, cache, drafter, rule
        self._state, self._record = state, record
        self._active = [True] * cache.slots
        self._under_way: deque[_Arrival] = deque()

    @property
    def sizes(self) -> Sequence[int]:
        """See ``Steps``: shapes are fixed."""
        return [self._drafter.nodes] * len(self._active)

    @torch.inference_mode()
    def next(self, prompts: Sequence[Prefill] = ()) -> list[list[int]]:
        """See ``Steps``; prompts have passes of their own."""
        if prompts:
            advance(self._base, prompts)
        rows_of_two = 2 * self._drafter.nodes
        if not self._under_way:
            self._cache.reserve(self._cache.longest + rows_of_two)
            self._launch()
        if self._cache.longest + rows_of_two <= self._cache.capacity:
            self._launch()
        return self._arrive()

    def _arrive(self) -> list[list[int]]:
        """The tokens of the oldest step under way."""
        tokens, counts = read_tokens(self._under_way.popleft().wait())
        self._cache.grow(counts)
        return [new if active else [] for new, active in zip(tokens, self._active, strict=True)]

    @torch.inference_mode()
    def stop(self) -> tuple[list[list[int]] | None, DecodeState]:
        """See ``Steps``: the step under way is waited for, and the state leaves the fixed buffers."""
        late = self._arrive() if self._under_way else None
        state = DecodeState(
            **{field.name: getattr(self._state, field.name).clone() for field in dataclasses.fields(self._state)}
        )
        self._cache.lengths = state.positions
        return late, state

    @torch.inference_mode()
    def keep(self, active: Sequence[bool]) -> None:
        """See ``Steps``; the step that is under way goes on with the others too."""
        self._active = list(active)
        self._state.active.copy_(torch.tensor(self._active), non_blocking=True)

    def _launch(self) -> None:
        """Send the next step on its way."""
        recorded, key = self._place().recorded, (self._drafter, self._rule)
        if key in recorded:
            recorded.move_to_end(key)
            recorded[key].replay()
            emitted = recorded[key].emitted
        else:
            emitted = self._step()
            self._record_step(recorded, key, emitted)
        self._under_way.append(_Arrival(emitted))

    def _record_step(self, recorded: _RecordedSteps, key: tuple[Drafter, Rule], like: Tensor) -> None:
        # Graphs share their memory: what outlives a replay is copied out of it, by the graph itself.
        emitted = torch.empty_like(like)
        replay = self._record(lambda: emitted.copy_(self._step()))
        if replay is not None:
            recorded[key] = _Recorded(replay, emitted)
        while len(recorded) > KEPT_GRAPHS:
            recorded.popitem(last=False)

    def _place(self) -> _Buffers:
        """The cache's fixed buffers; the state is moved there where it is not yet."""
        recorded = self._cache.recorded
        if self._cache.slots not in recorded:
            recorded[self._cache.slots] = _Buffers(self._state, self._cache.capacity)
        buffers: _Buffers = recorded[self._cache.slots]
        if self._state is not buffers.state:
            buffers.load(self._state)
            self._state, self._cache.lengths = buffers.state, buffers.state.positions
        return buffers

    def _step(self) -> Tensor:
        """One step from the fixed state to the fixed state."""
        cache, state = self._cache, self._state
        try:
            with cache.fixed_shapes():
                emitted, after, _ = step_on_device(self._base, cache, self._drafter, self._rule, state)
            for field in dataclasses.fields(state):
                getattr(state, field.name).copy_(getattr(after, field.name))
        finally:
            cache.lengths = state.positions
        return emitted


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
