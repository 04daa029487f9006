"""The serving engine: one thread that steps a ``Batch``, which requests join and leave at any time.

loop:  take arrivals: requests, cancellations, calls between two steps
       step: schedule, and one pass                                          (medusa/engine/batch.py)
       send each request its new text
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from medusa import BaseModel, Batch, EngineConfig, MedusaModel, Piece, Request
from medusa.cache import BLOCK, CachedSequence
from medusa.clock import machine_memory
from medusa.serve.jobs import Job
from medusa.serve.metrics import Metrics
from medusa.serve.recorder import Recorder
from medusa.serve.request import Asked, BusyError, Delta, EngineError, LateError, StoppingError, Ticket
from medusa.serve.settings import EngineSettings
from medusa.serve.threads import promise
from medusa.tree import Draft

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MEMORY = 0.4
"""Default share of the memory for the KV cache."""
STUCK = 60.0
"""Seconds without a turn of its loop after which the engine counts as broken."""
STOPPING = "the server is shutting down; ask another one"
SLOW_GRAMMAR = "grammar or schema takes too long to follow, as ambiguous ones do; make it simpler"
IDLE = 0.25
"""Most seconds that an idle engine sleeps before it checks the time."""


class Engine:
    """Serves all requests together; requests do not affect each other's text.

    Args:
        model: The model with its heads.
        settings: Limits.
        metrics: Counts what happens.
        recorder: Records completed requests; None = nobody does.

    Attributes:
        model: The current model; new requests use its heads.
    """

    def __init__(
        self, model: MedusaModel, settings: EngineSettings, metrics: Metrics, recorder: Recorder | None = None
    ) -> None:
        self.model, self.settings, self.metrics, self._recorder = model, settings, metrics, recorder
        self._pool = model.base.new_pool(settings.cache_tokens or cache_tokens(model))
        self._batch = self._new_batch()
        self._old: list[Batch] = []  # batches with requests from before a change of heads
        self._jobs: dict[Ticket, Job] = {}
        self._of: dict[Request, Job] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events: list[tuple[Ticket, Delta | Exception | None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._ending: asyncio.Task[None] | None = None
        self._counted = True
        self._turned = time.monotonic()

    def start(self) -> None:
        """Begin to serve; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, drain: float = 0.0) -> None:
        """Accept no more requests, give running ones ``drain`` seconds, and stop; later calls wait too."""
        self._stopping = True
        if self._ending is None:
            self._ending = asyncio.create_task(self._stop(drain))
        await self._ending

    async def _stop(self, drain: float) -> None:
        until = time.monotonic() + drain
        while self._jobs and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await self._call(self._end)
        await asyncio.to_thread(self._thread.join)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    def healthy(self) -> bool:
        """Whether the thread runs, its loop is not stuck, and no other rank is lost."""
        turning = time.monotonic() - self._turned < STUCK
        return self._thread.is_alive() and turning and not self.model.base.others.broken

    def submit(self, asked: Asked) -> Ticket:
        """Submit a request; the ticket reports whether it is accepted."""
        ticket = Ticket(asked, self._cancel)
        if self._stopping:  # the thread may have ended
            error = StoppingError(STOPPING)
            self.metrics.refused(error)
            ticket.put(error)
            return ticket
        now = time.monotonic()
        job = Job(ticket, now, now + asked.timeout if asked.timeout is not None else float("inf"))
        self._inbox.put(lambda: self._take(job))
        return ticket

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine's thread between two steps.

        Raises:
            StoppingError: The server is shutting down.
        """
        if self._stopping:
            raise StoppingError(STOPPING)
        return await self._call(function)

    async def _call(self, function: Callable[[], Result]) -> Result:
        found, compute = promise(function)
        self._inbox.put(compute)
        return await asyncio.wrap_future(found)

    def use(self, model: MedusaModel) -> None:
        """Serve new requests with another model over the same base; running ones keep theirs.

        So do waiting ones whose heads it does not have. Call it on the engine's thread (``call``).
        """
        self.model, before = model, self._batch
        self._batch = self._new_batch()
        waiting = [job for job in self._jobs.values() if job.batch is before and not job.admitted]
        for job in [job for job in waiting if job.asked.speculation.heads in (None, *model.named)]:
            del self._of[job.request]
            before.remove(job.request)
            self._add(job)
        if len(before):
            self._old.append(before)

    def _new_batch(self) -> Batch:
        settings = self.settings
        return self.model.batch(self._pool, EngineConfig(settings.max_batch, settings.prefill_rows))

    def _run(self) -> None:
        while self._loop is not None:
            self._turned = time.monotonic()
            try:
                self._receive(wait=not self._jobs)
                self._expire()
            except Exception as error:  # should not happen, and must not end the service
                logger.exception("the engine starts again, all requests are lost")
                self._lose(error)
            for batch in [*self._old, self._batch]:
                self._step(batch)
            self._old = [batch for batch in self._old if len(batch)]
            self._deliver()

    def _receive(self, wait: bool) -> None:
        """Process arrivals; without work, wait for them, and check the blocks of the KV cache once."""
        try:
            if wait:
                self._inbox.get(timeout=IDLE)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            if wait and not self._counted:
                self._counted = True
                self._pool.check_integrity()

    def _take(self, job: Job) -> None:
        """Check a request and let it wait for room in the batch."""
        asked = job.asked
        try:
            self._batch.check(asked.prompt, asked.params, asked.speculation)
            waiting = sum(not job.admitted for job in self._jobs.values())
            free = self.settings.max_batch - (len(self._jobs) - waiting)
            if waiting >= self.settings.max_waiting + max(0, free):
                most = self.settings.max_waiting
                message = f"queue is full ({most} requests wait, besides those that run); try again later"
                raise BusyError(message, self.metrics.seconds_per_request())
        except (ValueError, BusyError) as error:
            self.metrics.refused(error)
            self._events.append((job.ticket, error))
            return
        self._jobs[job.ticket] = job
        self._events.append((job.ticket, None))
        self._add(job)

    def _add(self, job: Job) -> None:
        """Add a request to the batch of the current model."""
        asked = job.asked
        try:
            job.constraint = asked.constraint() if asked.constraint is not None else None
            request = self._batch.add(
                asked.prompt, asked.params, asked.speculation, True, job.constraint, asked.client, asked.priority,
                continues=asked.text is not None,
            )  # fmt: skip
        except ValueError as error:
            self._events.append((job.ticket, error))
            del self._jobs[job.ticket]
            self.metrics.ended(job, "error")
            return
        job.batch, job.request, job.ticket.output = self._batch, request, request.output
        self._of[request] = job
        self._counted = False

    def _cancel(self, ticket: Ticket) -> None:
        self._inbox.put(lambda: self._withdraw(ticket, "abort"))

    def _withdraw(self, ticket: Ticket, outcome: str) -> None:
        """Remove a request, waiting or running."""
        job = self._jobs.pop(ticket, None)
        if job is None:
            return
        del self._of[job.request]
        job.batch.remove(job.request)
        self.metrics.ended(job, outcome)

    def _expire(self) -> None:
        """End requests whose time has passed."""
        now = time.monotonic()
        for ticket, job in list(self._jobs.items()):
            if job.deadline < now:
                self._events.append((ticket, LateError(f"timeout ({job.asked.timeout} s) has passed; allow more")))
                self._withdraw(ticket, "timeout")

    def _step(self, batch: Batch) -> None:
        """One step of a batch; an error ends its requests, and not the engine."""
        if not len(batch):
            return
        began, preempted = time.monotonic(), batch.preemptions
        try:
            grown = batch.step()
        except Exception as error:
            logger.exception("a step has failed, and its requests are lost")
            self._drop(batch, error)
            return
        now = time.monotonic()
        for job in self._jobs.values():
            if not job.admitted and (job.request.sequence is not None or job.request in grown):
                job.admitted = True
                self.metrics.admitted(job)
        for request, pieces in grown.items():
            if request in self._of:
                self._tell(self._of[request], pieces, now)
        self.metrics.stepped(len(grown), now - began, batch.preemptions - preempted)

    def _tell(self, job: Job, pieces: Sequence[Piece], now: float) -> None:
        """Send a request its new text; a request whose grammar holds up all others ends."""
        if job.constraint is not None and job.constraint.slow:
            self._events.append((job.ticket, ValueError(SLOW_GRAMMAR)))
            self._withdraw(job.ticket, "error")
            return
        output, before = job.request.output, job.told
        logprobs = tuple(output.logprobs[before:]) if output.logprobs is not None else ()
        scored = None if output.prompt_logprobs is None or job.first else tuple(output.prompt_logprobs)
        delta = Delta(tuple(pieces), tuple(output.tokens[before:]), logprobs, output.finish_reason, scored)
        job.told = len(output.tokens)
        self.metrics.grew(job, len(delta.tokens), now)
        self._events.append((job.ticket, delta))
        if output.finish_reason is not None:
            del self._of[job.request], self._jobs[job.ticket]
            self.metrics.ended(job, output.finish_reason)
            if self._recorder is not None and job.asked.recorded:
                self._recorder.add(job.request.prompt, output.tokens)

    def _drop(self, batch: Batch, error: Exception) -> None:
        """Drop a broken batch."""
        batch.close()
        for job in [job for job in self._jobs.values() if job.batch is batch]:
            del self._of[job.request], self._jobs[job.ticket]
            self._events.append((job.ticket, EngineError(f"a step has failed: {error}")))
            self.metrics.ended(job, "error")
        if batch is self._batch:
            self._batch = self._new_batch()
        self._old = [old for old in self._old if old is not batch]

    def _lose(self, error: Exception) -> None:
        """Drop all requests."""
        for batch in [*self._old, self._batch]:
            batch.close()
        for ticket, job in self._jobs.items():
            self._events.append((ticket, EngineError(f"the engine has failed: {error}")))
            self.metrics.ended(job, "error")
        self._jobs, self._of = {}, {}
        self._batch, self._old = self._new_batch(), []

    def _deliver(self) -> None:
        """Send all pending results to the event loop at once."""
        events, self._events = self._events, []
        waiting = sum(not job.admitted for job in self._jobs.values())
        usage = self._pool.held_tokens / max(1, self._pool.tokens or 1)
        self.metrics.state(len(self._jobs) - waiting, waiting, usage)
        if events and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_put_all, events)
            except RuntimeError:  # the event loop is closed
                self._loop = None

    def _end(self) -> None:
        for ticket in list(self._jobs):
            self._events.append((ticket, StoppingError("the server is shutting down; ask again later")))
            self._withdraw(ticket, "abort")
        self._deliver()
        self._loop = None


def cache_tokens(model: MedusaModel) -> int:
    """Positions of a KV cache that uses its share of the memory; at least one context.

    Caches of drafting models over the same texts are included.
    """
    base, small = model.base, model.drafters.parts.draft_model
    per_position = sum(position_bytes(one) for one in (base, small) if one is not None)
    remembering = [heads for heads in (model.heads, *model.named.values()) if heads is not None and heads.remembers]
    layers = len(remembering) + (base.mtp is not None)
    per_position += layers * position_bytes(base) // base.num_layers
    memory = torch.cuda.mem_get_info(base.device)[0] if base.device.type == "cuda" else machine_memory()
    return max(base.context_length + EngineConfig().tree_reserve, int(MEMORY * memory / per_position))


@torch.inference_mode()
def position_bytes(base: BaseModel) -> int:
    """Bytes of keys and values of one position in all layers of this process, measured by a pass."""
    pool = base.new_pool(BLOCK)
    tokens_11 = torch.zeros(1, 1, dtype=torch.int64, device=base.device)
    base.run(pool, base.plan([(Draft.chain(tokens_11), [CachedSequence(pool)])]))
    return sum(arena.block_bytes for arena in pool.arenas) // pool.size


def _put_all(events: Sequence[tuple[Ticket, Delta | Exception | None]]) -> None:
    for ticket, event in events:
        ticket.put(event)
