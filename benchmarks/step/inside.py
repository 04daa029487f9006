"""What a step is made of: where its time goes, and whether its memory grows."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
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


def watch_memory(step: Callable[[], object], steps: int, device: torch.device, marks: int = 10) -> list[dict[str, int]]:
    """Memory at so many times during many steps; a steady state shows the same numbers each time.

    Args:
        step: Runs one step and keeps nothing.
        steps: How many.
        device: On a GPU the allocator's high-water mark is read too.
        marks: How often memory is looked at.

    Returns:
        Per mark: ``steps`` so far, ``tensor_bytes`` of all live tensors between two steps, ``resident_bytes`` of the
        process (0 where the system does not tell), and on a GPU ``peak_bytes``.
    """
    found = []
    for mark in range(1, marks + 1):
        for _ in range(steps * mark // marks - steps * (mark - 1) // marks):
            step()
        synchronize(device)
        peak = {"peak_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
        sizes = {"tensor_bytes": live_tensor_bytes(), "resident_bytes": resident_bytes()}
        found.append({"steps": steps * mark // marks} | sizes | peak)
    return found


def live_tensor_bytes() -> int:
    """Bytes of all storages that a tensor in Python still holds, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    """Memory of this process that is in RAM, from Linux's /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
