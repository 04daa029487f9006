"""Time measurement on a noisy machine: candidates are measured alternately and compared within a round."""

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
"""Directory of Linux's control groups, and the file with this process's groups: lines of number:controllers:path."""
CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which users choose the number of threads."""
TORCHS_THREADS = torch.get_num_threads()
"""Torch's default; if the number differs later, the user has chosen it."""


def cores() -> int:
    """Number of cores that this process may use, limited by its affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(min(_quotas(), default=allowed))))


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_threads() -> None:
    """Limit the threads of torch and our kernels to ``cores``, unless the user has chosen a number.

    With more threads than a quota allows, the quota is used up early in each period, and all threads stop until the
    next one. A number that was chosen before this module was imported counts as torch's default.
    """
    threads, most = torch.get_num_threads(), cores()
    if threads > most and threads == TORCHS_THREADS and not any(name in os.environ for name in CHOICES):
        logger.info("using %d CPU threads instead of %d: this process may use no more cores", most, threads)
        torch.set_num_threads(most)


def _quotas() -> Iterator[float]:
    """Quotas, in cores, of this process's groups and their parent groups, if they are limited."""
    try:
        memberships = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in memberships:
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's: missing groups are skipped, and the root is the container's group.
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
    """Wait until a GPU has finished all its work."""
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
    """Take every sample once per round, after one round for warm-up; each round starts with another sample.

    Args:
        samples: Functions that measure once, by key.
        rounds: Number of rounds, at least 1.

    Returns:
        One measurement per round, by key.
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
