"""Clocks for a noisy machine: what is compared is measured alternately, and compared within a round."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

Key = TypeVar("Key")

GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's control groups, and a file with those of this process: lines of number:controllers:path."""
CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which users choose a number of threads."""
TORCHS_THREADS = torch.get_num_threads()
"""What torch chose; another number later is the user's choice."""


def cores() -> int:
    """Cores that this process may use: those it may run on, no more than its container's quota is worth."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(min(_quotas(), default=allowed))))


def machine_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_threads() -> None:
    """Let torch, and with it our kernels, use no more threads than ``cores``, unless the user chose a number.

    Threads beyond a quota use it up early in each period; then all of them stand still until the next one, also those
    that the others wait for. What was chosen before this module was imported counts as torch's own choice.
    """
    threads, most = torch.get_num_threads(), cores()
    if threads > most and threads == TORCHS_THREADS and not any(name in os.environ for name in CHOICES):
        logger.info("using %d CPU threads instead of %d: this process may use no more cores", most, threads)
        torch.set_num_threads(most)


def _quotas() -> Iterator[float]:
    """Cores' worth of time that the groups of this process and those around them may use, where that is limited."""
    try:
        memberships = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in memberships:
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's; what is not there is passed over, and the root is the container's.
        group = Path(path.lstrip("/"))
        for place in (group, *group.parents):
            directory = GROUPS / controllers / place
            try:
                if controllers:
                    quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (directory / "cpu.max").read_text().split()
                if quota != "max" and int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):
                continue


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of a call, until the device has finished."""
    synchronize(device)
    begin = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - begin


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
