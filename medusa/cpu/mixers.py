"""Recurrent layers in a fused pass (kernels/mixer.h): their weights, and what a pass reads and writes of their states.

Legend: R rows of a pass, C channels of a convolution, W its width, H heads, K and V the sizes of their keys and values.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from medusa.base.recurrent_block import MixerParts
from medusa.cpu.native import addresses
from medusa.cpu.recurrence import Filter, Steps, filter_of
from medusa.recurrence import RecurrentPass

KINDS = ("short convolution", "delta rule", "Mamba 2")
"""``MixerKind`` of the kernel."""
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Mixer(ctypes.Structure):
    """``Mixer`` of the kernel."""

    _fields_ = [
        *[(name, _INT) for name in ("kind", "key_heads", "heads", "keys", "values", "groups")],
        ("filter", Filter),
        *[(name, _POINTER) for name in ("slopes", "steps", "skips", "norm")],
        *[(name, ctypes.c_float) for name in ("epsilon", "least", "most")],
    ]


class Memory(ctypes.Structure):
    """``Memory`` of the kernel."""

    _fields_ = [
        (name, _POINTER)
        for name in ("windows", "taken", "inputs", "states", "pasts", "ends", "key", "value", "decay", "rate")
    ]  # fmt: skip


class _Past(ctypes.Structure):
    """``Past`` of the kernel."""

    _fields_ = [("rows", Steps), ("path", _POINTER), ("count", _INT), ("state", _POINTER)]


class Mixer:
    """A recurrent layer between its linear layers.

    Args:
        index: Index of the layer.
        parts: Its weights.
    """

    def __init__(self, index: int, parts: MixerParts) -> None:
        self._index, self._parts = index, parts
        self._filter, self._alive = filter_of(parts.filter, parts.bias, parts.silu)
        factors = [
            None if x is None else x.detach().float().contiguous() for x in (parts.slopes, parts.steps, parts.skips)
        ]
        tensors = [*factors, None if parts.norm is None else parts.norm.detach()]
        self._alive += [x for x in tensors if x is not None]
        self._shape = parts.heads, parts.keys, parts.values
        self.struct = _Mixer(
            KINDS.index(parts.kind), parts.key_heads, parts.heads, parts.keys, parts.values, parts.groups, self._filter,
            *(None if x is None else x.data_ptr() for x in tensors), parts.epsilon, *parts.bounds,
        )  # fmt: skip

    def memory(self, own: RecurrentPass, rows: int) -> tuple[Memory, Callable[[], None]]:
        """What a pass of R rows reads and writes, and a function that keeps it when the pass has ended."""
        parts, own.layer = self._parts, self._index
        inputs_RC = parts.filter.new_empty(rows, self._filter.channels)
        windows = own.windows(self._filter.width - 1, inputs_RC)
        inputs, taken = torch.cat(windows), own.taken(self._filter.width - 1)
        alive: list[Any] = [inputs, taken]
        memory = Memory(inputs.data_ptr(), taken.data_ptr(), inputs_RC.data_ptr())
        if parts.heads:
            before, states, pasts = self._begin(own, alive)
            ends = [torch.empty_like(state) if chain else None for state, chain in zip(states, own.chains, strict=True)]
            heads = parts.heads
            sizes = [(parts.key_heads, parts.keys), (heads, parts.values), (heads,), (heads,)]
            given = [
                torch.empty(rows, *size, dtype=torch.float32)
                for size in sizes[: 4 if parts.kind == "delta rule" else 3]
            ]
            arrays = addresses(before), pasts, addresses(ends)
            alive += arrays
            memory.states, memory.pasts, memory.ends = (ctypes.addressof(array) for array in arrays)
            for name, x in zip(("key", "value", "decay", "rate"), given, strict=False):
                setattr(memory, name, x.data_ptr())

        def keep() -> None:
            own.layer = self._index
            own.keep_inputs(windows, inputs_RC)
            if parts.heads:
                own.keep_rows(states, given, ends)
            alive.clear()

        return memory, keep

    def _begin(self, own: RecurrentPass, alive: list[Any]) -> tuple[list[Tensor], list[Tensor], Any]:
        """The states from which texts begin, those before the pass's rows, and the rows that lead there."""
        begun, states, found = [], [], own.reach()
        pasts = (_Past * len(found))()
        for number, (kept, path) in enumerate(found):
            begun.append(torch.zeros(self._shape, dtype=torch.float32) if kept is None else kept.state)
            states.append(torch.empty_like(begun[-1]) if path else begun[-1])
            if kept is not None and path:
                places, rows = (_INT * len(path))(*path), [x.data_ptr() for x in kept.rows]
                alive += [places, kept]
                pasts[number] = _Past(Steps(None, *rows), ctypes.addressof(places), len(path), states[-1].data_ptr())
        return begun, states, pasts
