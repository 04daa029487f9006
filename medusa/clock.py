"""Clocks for a noisy machine: what is compared is measured alternately, and compared within a round."""

import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
