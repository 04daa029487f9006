"""The serving engine: one thread that steps a ``Batch`` which requests join and leave all the time.

loop:  take what has arrived: requests, cancellations, calls between two steps
       admit those that wait, while there is room
       step: a chunk of the prompts that wait, then one decode step of all that are ready   (medusa/engine/batch.py)
       hand each request what it has grown by
"""

import asyncio
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from medusa import BaseModel, Completion, MedusaModel
from medusa.cache import BLOCK
from medusa.engine.batch import Batch
from medusa.engine.output import Piece
from medusa.engine.row import TREES, most_rows
from serve.jobs import Job, Waiting
from serve.metrics import Metrics
from serve.request import BusyError, Delta, EngineError, LateError, Request, StoppingError, Ticket
from serve.settings import EngineSettings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MEMORY = 0.4
"""Share of the memory that the KV cache may have where nothing else is said."""
IDLE = 0.25
"""Seconds that an engine without work sleeps at most before it looks at the time."""


class Engine:
    """Serves requests of any kind together; one of them decides nothing about the text of another.

    Args:
        model: With its heads.
        settings: Limits.
        metrics: Is told what happens.
    """

    def __init__(self, model: MedusaModel, settings: EngineSettings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self._model = model
        self._cache_tokens = (settings.cache_tokens or cache_tokens(model.base)) // BLOCK * BLOCK
        self._pool = model.base.new_pool(self._cache_tokens)
        self._batch = self._new_batch()
        self._old: list[Batch] = []  # with requests of before the heads have changed
        self._waiting = Waiting()
        self._running: dict[Completion, Job] = {}
        self._jobs: dict[Ticket, Job] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events: list[tuple[Ticket, Delta | Exception | None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._turned = time.monotonic()

    @property
    def model(self) -> MedusaModel:
        """The model as it is now; new requests meet its heads."""
        return self._model

    def start(self) -> None:
        """Begin to serve; what comes back is handed to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, drain: float = 0.0) -> None:
        """Take no more requests, let those that run go on for so many seconds, and end."""
        self._stopping = True
        until = time.monotonic() + drain
        while self._jobs and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await self.call(self._end)
        await asyncio.to_thread(self._thread.join)

    def healthy(self, patience: float) -> bool:
        """Whether the thread runs, and its loop has turned in so many seconds."""
        return self._thread.is_alive() and time.monotonic() - self._turned < patience

    def submit(self, request: Request) -> Ticket:
        """Send a request on its way; whether it is taken, the ticket will say."""
        ticket = Ticket(request, self._cancel)
        now = time.monotonic()
        job = Job(ticket, now, now + request.timeout if request.timeout is not None else float("inf"))
        self._inbox.put(lambda: self._take(job))
        return ticket

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine's thread between two steps."""
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - it is the caller's
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._inbox.put(run)
        answer: Result = await future
        return answer

    def use(self, model: MedusaModel) -> None:
        """Serve new requests with another model over the same base; those that run go on with theirs.

        On the engine's thread (``call``).
        """
        if len(self._batch):
            self._old.append(self._batch)
        self._model = model
        self._batch = self._new_batch()

    def _new_batch(self) -> Batch:
        return self._model.batch(self._pool, self.settings.prefill_rows)

    def _run(self) -> None:
        while self._loop is not None:
            self._turned = time.monotonic()
            try:
                self._receive(wait=not self._running)
                self._expire()
                self._admit()
            except Exception as error:  # no request should come to this, and none may end the service
                logger.exception("the engine begins anew, all requests are lost")
                self._lose(error)
            for batch in [*self._old, self._batch]:
                self._step(batch)
            self._old = [batch for batch in self._old if len(batch)]
            self._deliver()

    def _receive(self, wait: bool) -> None:
        """Do what has arrived; without work, wait for it."""
        try:
            if wait:
                self._inbox.get(timeout=IDLE)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _take(self, job: Job) -> None:
        """Check a request and let it wait."""
        request, limit = job.request, self._cache_tokens
        try:
            if self._stopping:
                raise StoppingError("the server is going down; ask another one")
            self._batch.check(request.prompt, request.params, request.speculation)
            prompt, room = len(request.prompt), self._model.base.context_length - len(request.prompt)
            rows = most_rows(prompt, min(request.params.max_new_tokens, room), request.speculation.nodes)
            job.rows = -(-rows // BLOCK) * BLOCK
            if job.rows > limit:
                raise ValueError(
                    f"prompt, completion and drafts ({job.rows} rows) exceed the KV cache ({limit} rows); shorten them"
                )
            free = self.settings.max_batch - len(self._running)
            if len(self._waiting) >= self.settings.max_waiting + max(0, free):
                message = f"queue ({len(self._waiting)} requests) is full; try again later"
                raise BusyError(message, self.metrics.seconds_per_request())
        except (ValueError, BusyError, StoppingError) as error:
            self.metrics.refused(error)
            self._events.append((job.ticket, error))
            return
        self._jobs[job.ticket] = job
        self._waiting.add(job)
        self._events.append((job.ticket, None))

    def _cancel(self, ticket: Ticket) -> None:
        self._inbox.put(lambda: self._withdraw(ticket, "abort"))

    def _withdraw(self, ticket: Ticket, outcome: str) -> None:
        """Let a request go, wherever it is."""
        job = self._jobs.pop(ticket, None)
        if job is None:
            return
        self._waiting.remove(job)
        if job.completion is not None and job.batch is not None:
            self._running.pop(job.completion, None)
            job.batch.remove(job.completion)
        self.metrics.ended(job, outcome)

    def _expire(self) -> None:
        """Let those go whose time is over."""
        now = time.monotonic()
        for ticket, job in list(self._jobs.items()):
            if job.deadline < now:
                self._events.append((ticket, LateError(f"timeout ({job.request.timeout} s) is over; allow more")))
                self._withdraw(ticket, "timeout")

    def _admit(self) -> None:
        """Let those join for whom there is room."""
        clients = Counter(job.request.client for job in self._running.values())
        held = sum(job.rows for job in self._running.values())
        while len(self._running) < self.settings.max_batch and (job := self._waiting.next(clients)) is not None:
            if self._running and held + job.rows > self._cache_tokens:
                break
            self._waiting.remove(job)
            self._join(job)
            clients[job.request.client] += 1
            held += job.rows

    def _join(self, job: Job) -> None:
        request = job.request
        try:
            constraint = request.constraint() if request.constraint is not None else None
            completion = self._batch.add(request.prompt, request.params, request.speculation, True, None, constraint)
        except ValueError as error:  # its heads have gone while it waited
            self._events.append((job.ticket, error))
            self._jobs.pop(job.ticket, None)
            self.metrics.ended(job, "error")
            return
        job.batch, job.completion, job.ticket.output = self._batch, completion, completion.output
        self._running[completion] = job
        self.metrics.admitted(job)

    def _step(self, batch: Batch) -> None:
        """One step of a batch; an error costs its requests, and not the engine."""
        if not len(batch):
            return
        began = time.monotonic()
        try:
            grown = batch.step()
        except Exception as error:
            logger.exception("a step has failed, its requests are lost")
            self._drop(batch, error)
            return
        now = time.monotonic()
        for completion, pieces in grown.items():
            if completion in self._running:
                self._tell(self._running[completion], completion, pieces, now)
        self.metrics.stepped(len(grown), now - began)

    def _tell(self, job: Job, completion: Completion, pieces: Sequence[Piece], now: float) -> None:
        """Hand a request what it has grown by."""
        output, before = completion.output, job.told
        logprobs = tuple(output.logprobs[before:]) if output.logprobs is not None else ()
        delta = Delta(tuple(pieces), tuple(output.tokens[before:]), logprobs, output.finish_reason)
        job.told = len(output.tokens)
        self.metrics.grew(job, len(delta.tokens), now)
        self._events.append((job.ticket, delta))
        if output.finish_reason is not None:
            del self._running[completion], self._jobs[job.ticket]
            self.metrics.ended(job, output.finish_reason)

    def _drop(self, batch: Batch, error: Exception) -> None:
        """Go on without a batch that is broken."""
        for job in [job for job in self._running.values() if job.batch is batch]:
            assert job.completion is not None, "it runs"
            del self._running[job.completion], self._jobs[job.ticket]
            self._events.append((job.ticket, EngineError(f"a step has failed: {error}")))
            self.metrics.ended(job, "error")
        if batch is self._batch:
            self._batch = self._new_batch()
        self._old = [old for old in self._old if old is not batch]

    def _lose(self, error: Exception) -> None:
        """Go on without any request."""
        for ticket, job in self._jobs.items():
            self._events.append((ticket, EngineError(f"the engine has failed: {error}")))
            self.metrics.ended(job, "error")
        self._jobs, self._running, self._waiting = {}, {}, Waiting()
        self._batch, self._old = self._new_batch(), []

    def _deliver(self) -> None:
        """Hand over what has happened, all at once."""
        events, self._events = self._events, []
        self.metrics.state(len(self._running), len(self._waiting))
        if self._pool is not None:
            self.metrics.cache(self._pool.held_tokens / self._cache_tokens)
        if events and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_put_all, events)
            except RuntimeError:  # the event loop is closed: nobody listens any more
                self._loop = None

    def _end(self) -> None:
        for ticket in list(self._jobs):
            self._events.append((ticket, StoppingError("the server is going down")))
            self._withdraw(ticket, "abort")
        self._deliver()
        self._loop = None


def cache_tokens(base: BaseModel) -> int:
    """Rows of a KV cache that has its share of the memory; at least one context."""
    config = base.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * base.num_layers * heads * dim * base.dtype.itemsize
    if base.device.type == "cuda":
        memory = torch.cuda.mem_get_info(base.device)[0]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(base.context_length + TREES, int(MEMORY * memory / row))


def _put_all(events: Sequence[tuple[Ticket, Delta | Exception | None]]) -> None:
    for ticket, event in events:
        ticket.put(event)


def _settle(future: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
