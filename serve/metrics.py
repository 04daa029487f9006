"""What the engine does, as Prometheus figures: vLLM's names behind our prefix, so that its dashboards fit."""

import time
from collections import deque
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.request import BusyError

if TYPE_CHECKING:
    from serve.jobs import Job

PREFIX = "medusa:"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
"""Seconds between tokens."""
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
"""Seconds until the first token, and until the last."""
DEEPEST = 16
"""Depths of drafts that are told apart; deeper ones count as the last."""
RECENT = 64
"""Requests by which the next ones' time is guessed."""


class Metrics:
    """Figures of one engine; told on its thread, read on any.

    Args:
        model: Name of the base, a label of all figures.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model}
        self._running = self._gauge("num_requests_running", "Requests that decode or are in prefill")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for room in the batch")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token", LONG)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of a request", SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", LONG)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to admission", LONG)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self._generated = self._counter("generation_tokens", "Tokens of completions")
        self._success = self._counter("request_success", "Requests that have ended, by reason", "finished_reason")
        self._refused = self._counter("request_refused", "Requests that were not taken, by reason", "reason")
        self._asked = self._counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache")
        self._found = self._counter("prefix_cache_hits", "Prompt tokens that were found there")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps of a request with a draft")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens that were verified")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted")
        self._by_depth = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by their depth", "position"
        )
        self._steps = self._histogram("step_seconds", "A chunk of prompts and a decode step of all requests", SHORT)
        self._recent: deque[float] = deque(maxlen=RECENT)

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)

    def state(self, running: int, waiting: int) -> None:
        """How many requests there are now."""
        self._running.labels(**self._label).set(running)
        self._waiting.labels(**self._label).set(waiting)

    def cache(self, usage: float) -> None:
        """Share of the KV cache that is in use."""
        self._usage.labels(**self._label).set(usage)

    def refused(self, error: Exception) -> None:
        """A request was not taken."""
        reason = "busy" if isinstance(error, BusyError) else "invalid"
        self._refused.labels(**self._label, reason=reason).inc()

    def admitted(self, job: "Job") -> None:
        """A request has joined the batch."""
        self._prompt.labels(**self._label).inc(len(job.request.prompt))
        self._queued.labels(**self._label).observe(time.monotonic() - job.arrived)

    def grew(self, job: "Job", tokens: int, now: float) -> None:
        """A request has grown in a step that ended now."""
        if not job.first:
            job.first = now
            self._first.labels(**self._label).observe(now - job.arrived)
            self._asked.labels(**self._label).inc(job.ticket.output.prompt_tokens)
            self._found.labels(**self._label).inc(job.ticket.output.cached_tokens)
        else:
            between = self._between.labels(**self._label)
            for _ in range(tokens):  # tokens of a step come together: each takes its share of the time
                between.observe((now - job.latest) / tokens)
        job.latest = now
        self._generated.labels(**self._label).inc(tokens)

    def ended(self, job: "Job", reason: str) -> None:
        """A request has ended: "eos", "stop", "length", "abort", "timeout" or "error"."""
        output, now = job.ticket.output, time.monotonic()
        self._success.labels(**self._label, finished_reason=reason).inc()
        self._whole.labels(**self._label).observe(now - job.arrived)
        self._recent.append(now)
        accepted = sum(count * depth for depth, count in enumerate(output.accepted))
        if not output.draft_tokens:
            return
        self._drafts.labels(**self._label).inc(output.steps)
        self._drafted.labels(**self._label).inc(output.draft_tokens)
        self._accepted.labels(**self._label).inc(accepted)
        for depth in range(1, len(output.accepted)):
            reached = sum(output.accepted[depth:])
            self._by_depth.labels(**self._label, position=min(depth, DEEPEST) - 1).inc(reached)

    def stepped(self, rows: int, seconds: float) -> None:
        """The engine has made a step."""
        if rows:
            self._steps.labels(**self._label).observe(seconds)

    def seconds_per_request(self) -> float:
        """About how long until one more request has ended, for ``Retry-After``."""
        if len(self._recent) < 2:
            return 1.0
        return (self._recent[-1] - self._recent[0]) / (len(self._recent) - 1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ["model_name"], registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
