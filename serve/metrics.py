"""Prometheus metrics of the engine, with vLLM's names after our prefix, so that its dashboards fit."""

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from medusa.serve.jobs import Job
from medusa.serve.request import BusyError, StoppingError

PREFIX = "medusa:"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
"""Histogram buckets for seconds between tokens."""
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
"""Histogram buckets for seconds to the first token, and to the last."""
DEEPEST = 16
"""Number of draft depths that are counted separately; deeper ones are not counted."""
RECENT = 64
"""Number of ended requests from which the time of the next is estimated."""
LONGEST_WAIT = 30.0
"""Most seconds of ``Retry-After``."""


class Metrics:
    """Metrics of one engine; written on its thread, read on any.

    Args:
        model: Name of the base, a label of all metrics.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU time and open files of this process
        self._model = model
        self._running = self._gauge("num_requests_running", "Requests that decode or are in prefill")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for room in the batch")
        self._tasks = self._gauge("event_loop_tasks", "Tasks of the event loop: connections, requests, streams")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token", LONG)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of a request", SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", LONG)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to admission", LONG)
        self._steps = self._histogram("step_seconds", "A chunk of prompts and a decode step of all requests", SHORT)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self._generated = self._counter("generation_tokens", "Tokens of completions")
        self._success = self._counters("request_success", "Requests that have ended, by reason", "finished_reason")
        self._refused = self._counters("request_refused", "Requests that were not taken, by reason", "reason")
        self._preemptions = self._counter("num_preemptions", "Times that a request lost its blocks and waited again")
        self._asked = self._counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache")
        self._found = self._counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps of requests")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens that were verified")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted")
        by_depth = self._counters(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by their depth", "position"
        )
        self._by_depth = [by_depth.labels(model, depth) for depth in range(DEEPEST)]
        self._recent: deque[float] = deque(maxlen=RECENT)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def state(self, running: int, waiting: int, usage: float) -> None:
        """Set the current numbers of requests, and the share of the KV cache that is in use."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(usage)

    def tasks(self, count: int) -> None:
        """Set the current number of tasks of the event loop."""
        self._tasks.set(count)

    def refused(self, error: Exception) -> None:
        """Count a refused request."""
        reason = {BusyError: "busy", StoppingError: "stopping"}.get(type(error), "invalid")
        self._refused.labels(self._model, reason).inc()

    def admitted(self, job: Job) -> None:
        """Count a request that has joined the batch."""
        self._prompt.inc(len(job.request.prompt))
        self._queued.observe(time.monotonic() - job.arrived)

    def grew(self, job: Job, tokens: int, now: float) -> None:
        """Count new tokens of a request after a step."""
        output = job.ticket.output
        if not job.first:
            job.first = now
            self._first.observe(now - job.arrived)
            self._asked.inc(output.prompt_tokens)
            self._found.inc(output.cached_tokens)
        else:
            for _ in range(tokens):  # tokens of a step arrive together: each gets its share of the time
                self._between.observe((now - job.latest) / tokens)
        job.latest = now
        self._generated.inc(tokens)
        self._drafts.inc(output.steps - job.steps)
        self._drafted.inc(output.draft_tokens - job.draft_tokens)
        before = job.accepted + [0] * (len(output.accepted) - len(job.accepted))
        for count, (now_so, before_so) in enumerate(zip(output.accepted, before, strict=True)):
            for depth in range(min(count, DEEPEST)):
                self._by_depth[depth].inc(now_so - before_so)
            self._accepted.inc(count * (now_so - before_so))
        job.steps, job.draft_tokens, job.accepted = output.steps, output.draft_tokens, list(output.accepted)

    def ended(self, job: Job, reason: str) -> None:
        """Count an ended request by reason: "eos", "stop", "length", "abort", "timeout" or "error"."""
        now = time.monotonic()
        self._success.labels(self._model, reason).inc()
        self._whole.observe(now - job.arrived)
        self._recent.append(now)

    def stepped(self, rows: int, seconds: float, preemptions: int) -> None:
        """Count a step, and the requests that were preempted before it."""
        self._preemptions.inc(preemptions)
        if rows:
            self._steps.observe(seconds)

    def seconds_per_request(self) -> float:
        """Estimated seconds until one more request has ended, for ``Retry-After``."""
        if len(self._recent) < 2:
            return 1.0
        return min(LONGEST_WAIT, (self._recent[-1] - self._recent[0]) / (len(self._recent) - 1))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counters(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", label], registry=self.registry)
