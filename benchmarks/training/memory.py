"""Memory: the peak of a call, and what is free."""

import os
from collections.abc import Callable
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """Most bytes that tensors made by `action` held at one time, beyond what was there before.

    On a GPU the allocator knows. On a CPU every storage that an operator returns is counted until it is freed; what a
    kernel needs inside itself is not.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return int(torch.cuda.max_memory_allocated(device)) - before
    live = _LiveBytes()
    with live:
        action()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **kwargs)
        for storage in {leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)} - known:
            self._add(storage.nbytes())
            finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
