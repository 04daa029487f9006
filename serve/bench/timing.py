"""Samples of many calls, ratios of what was measured in one round, and the memory's bandwidth."""

from collections.abc import Callable
from statistics import median

import torch

from medusa.clock import seconds

CALLS = 3
"""Calls per sample, at least; their median counts."""
SAMPLE_SECONDS = 0.05
"""Length of a sample of many short calls: after one call that warms the caches again, as in a loop of steps."""
BUFFER_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
"""Size of what the bandwidth is measured with: many times the caches."""


def timed(action: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Median wall-clock seconds of a call, until the device has finished."""
    calls = max(calls, int(SAMPLE_SECONDS / seconds(action, device)))
    return median(seconds(action, device) for _ in range(calls))


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
