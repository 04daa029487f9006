"""Clocks for a noisy machine: everything that is compared is measured alternately, and compared within a round."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

import torch

Key = TypeVar("Key")
CALLS = 3
"""Calls per sample, at least; their median counts."""
SAMPLE_SECONDS = 0.05
"""Length of a sample of many short calls: after one call that warms the caches again, as in a loop of steps."""
BUFFER_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
"""Size of what the bandwidth is measured with: many times the caches."""


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(action: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Median wall-clock seconds of a call, until the device has finished."""

    def once() -> float:
        synchronize(device)
        begin = time.perf_counter()
        action()
        synchronize(device)
        return time.perf_counter() - begin

    calls = max(calls, int(SAMPLE_SECONDS / once()))
    return median(once() for _ in range(calls))


def alternate(samples: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """Take every sample once per round, after one round that does not count; each round begins with another one.

    Args:
        samples: By key, functions that measure once.
        rounds: At least 1.

    Returns:
        By key, one measurement per round.
    """
    keys = list(samples)
    measured: dict[Key, list[float]] = {key: [] for key in keys}
    for number in range(-1, rounds):
        shift = number % len(keys)
        for key in keys[shift:] + keys[:shift]:
            value = samples[key]()
            if number >= 0:
                measured[key].append(value)
    return measured


def ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median over the rounds of the ratio of two measurements of one round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def bandwidth_samples(device: torch.device) -> dict[str, Callable[[], float]]:
    """Ways to keep the memory busy with all of torch's threads; each measures bytes per second once."""
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
        name: lambda action=action, count=count: count / timed(action, device)  # type: ignore[misc]
        for name, (action, count) in moved.items()
    }
