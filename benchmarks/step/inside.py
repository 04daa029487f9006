"""Where the time of a step goes."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from medusa.clock import synchronize

PROFILED_STEPS = 10
TOP = 12
"""Operators that a profile names."""


def profile_steps(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Shares of the wall-clock time of steps under torch's profiler.

    On a CPU what no operator accounts for is Python and our own kernels. On a GPU operators are kernels, and the rest
    is time in which the GPU had nothing to do. The profiler itself slows the host: shares are those of the slowed step.

    Args:
        step: Runs one step.
        device: Where it runs.
    """
    cuda = device.type == "cuda"
    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        begin = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        synchronize(device)
        wall = time.perf_counter() - begin
    attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
    # On a GPU the kernels alone: the operators that launched them show the same time once more.
    events = [event for event in profiler.key_averages() if (event.device_type.name != "CPU") == cuda]
    seconds = {event.key: getattr(event, attribute) / 1e6 for event in events}
    top = sorted(seconds, key=lambda name: -seconds[name])[:TOP]
    named = sum(seconds.values())
    rest = {"other operators": named - sum(seconds[name] for name in top), "no operator": max(0.0, wall - named)}
    return {
        "steps": PROFILED_STEPS,
        "profiled_step_ms": round(1e3 * wall / PROFILED_STEPS, 4),
        "shares": {
            name: round(part / wall, 4) for name, part in ({name: seconds[name] for name in top} | rest).items()
        },
    }
