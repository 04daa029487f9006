"""A server's own metrics under load; a value that grows and does not shrink again is a leak."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from medusa.benchmarks.picture import Field, Line

SECONDS = 1.0
"""Seconds between two readings."""
SETTLE = 3.0
"""Seconds after the load until a server counts as idle."""
MEGABYTE = 2**20
FIGURES = {
    "process_resident_memory_bytes": "memory, MB",
    "num_requests_running": "requests that run",
    "num_requests_waiting": "requests that wait",
    "kv_cache_usage_perc": "KV cache held, %",
    "event_loop_tasks": "tasks of the event loop",
    "process_open_fds": "open files",
}
"""Metrics that are read from /metrics, without their prefix, and their names for people."""
SCALES = {"process_resident_memory_bytes": 1 / MEGABYTE, "kv_cache_usage_perc": 100.0}


class Watch:
    """A context that reads /metrics every second, in a thread.

    Args:
        url: Address of the API, including /v1.

    Attributes:
        samples: "seconds" since the start, and metrics by name; metrics that the server lacks are missing.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/metrics"
        self.samples: list[dict[str, float]] = []
        self._http = httpx.Client(timeout=30, trust_env=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        time.sleep(SETTLE)
        self._look()
        self._http.close()

    def summary(self) -> list[str]:
        """A line per metric: before the load, the maximum, and when the server was idle again."""
        lines = []
        for name, label in FIGURES.items():
            values = [sample[name] for sample in self.samples if name in sample]
            if values:
                lines.append(f"{label}: {values[0]:.5g} before, {max(values):.5g} at most, {values[-1]:.5g} after")
        return lines

    def _run(self) -> None:
        while not self._ended.wait(SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            text = self._http.get(self._url).raise_for_status().text
        except httpx.HTTPError:
            if not self.samples:
                raise
            return
        figures = {"seconds": time.monotonic() - self._began}
        for family in text_string_to_metric_families(text):
            name = family.name.rpartition(":")[2]
            if name in FIGURES:
                figures[name] = sum(sample.value for sample in family.samples) * SCALES.get(name, 1.0)
        self.samples.append(figures)


def curves(samples: Sequence[Mapping[str, float]]) -> list[Field]:
    """The metrics over time."""
    fields = []
    for name, label in FIGURES.items():
        known = [sample for sample in samples if name in sample]
        if known:
            line = Line([sample["seconds"] for sample in known], [sample[name] for sample in known], "-")
            fields.append(Field({label: line}, "seconds", label))
    return fields
