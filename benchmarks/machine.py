"""The measured machine: its devices by name, timing of many short calls, and its memory bandwidth."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from medusa.clock import seconds

CALLS = 3
"""Least number of calls per sample; the result is their median."""
SAMPLE_SECONDS = 0.05
"""Length of a sample of many short calls, after one warm-up call, so that caches are warm as in a loop of steps."""
BUFFER_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
"""Size of the buffers for the bandwidth, many times the caches."""

Key = tuple[Any, ...]
"""Key of a measurement: name, batch B, nodes N."""


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Median wall-clock seconds of a call, until the device has finished."""
    calls = max(CALLS, int(SAMPLE_SECONDS / seconds(action, device)))
    return median(seconds(action, device) for _ in range(calls))


def ratio(numerators: list[float], denominators: list[float]) -> float:
    """Ratio of two measurements in the same round, median over the rounds."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def bandwidth_samples(device: torch.device) -> dict[Key, Callable[[], float]]:
    """Functions that saturate the memory with all of torch's threads; each measures bytes per second once."""
    size = BUFFER_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    moved = {
        "sum of float32": (source.sum, size),
        "maximum of float32": (source.max, size),
        "copy, read and write counted": (lambda: target.copy_(source), 2 * size),
    }
    return {
        ("bandwidth", name): lambda action=action, count=count: count / timed(action, device)  # type: ignore[misc]
        for name, (action, count) in moved.items()
    }


def best_bandwidth(times: Mapping[Key, list[float]]) -> tuple[str, float]:
    """The fastest of ``bandwidth_samples``, and its median bytes per second."""
    best = {key[1]: median(values) for key, values in times.items() if key[0] == "bandwidth"}
    method = max(best, key=lambda name: best[name])
    return method, best[method]
