"""A stand-in for CUDA graphs on a CPU: the operators of a function, repeated on the very same memory.

Like a graph it keeps addresses and the numbers that Python computed, and nothing else: a function whose shapes or
choices depend on the host writes wrong text from its second run on, and one that waits for a value cannot be recorded.
"""

from itertools import compress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.cpu import native

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.equal}


def tensors_of(*values):
    """As torch's own ``tree_leaves``, which takes most of a replay's time."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(*value)
        elif isinstance(value, dict):
            found += tensors_of(*value.values())
    return found


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Strict(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: reading values, and copies between the host and the device.

    As on a GPU there are no kernels for CPUs meanwhile: torch's operators alone are seen.
    """

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(native, "available", lambda: False)
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        packet, inputs = function.overloadpacket, tensors_of(arguments, options)
        masks = packet is aten.index and any(tensor.dtype == torch.bool for tensor in inputs[1:])
        from_a_list = (
            packet is aten.lift_fresh and inputs[0].dim() > 0
        )  # assigning a number to a slice makes one of none
        if packet in WAITS or from_a_list or masks:
            raise RuntimeError(f"{packet} is not permitted while a stream is capturing")
        out = function(*arguments, **(options or {}))
        if packet in (aten._to_copy, aten.copy_) and len({t.device for t in [*inputs, *tensors_of(out)]}) > 1:
            raise RuntimeError(f"{packet} between devices is not permitted while a stream is capturing")
        return out


class Tape(Strict):
    """What a function did; only the numbers that it left are undone."""

    def __init__(self, function):
        super().__init__()
        self.calls, self.before = [], {}
        try:
            with self:
                function()
        finally:
            for storage, content in self.before.values():
                storage.copy_(content)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options, writes = options or {}, False
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes = True
                written = arguments[place] if place < len(arguments) else options[argument.name]
                for tensor in written if isinstance(written, list) else [written]:
                    if address(tensor) not in self.before:
                        storage = tensor.untyped_storage()
                        self.before[address(tensor)] = storage, storage.clone()
        out = super().__torch_dispatch__(function, types, arguments, options)
        known, made = {address(tensor) for tensor in tensors_of(arguments, options)}, tensors_of(out)
        fresh = [address(tensor) not in known for tensor in made]  # neither a view nor changed in place
        if writes or any(fresh):
            self.calls.append((function, arguments, options, made, fresh))
        return out

    def __call__(self):
        for function, arguments, options, made, fresh in self.calls:
            again = function(*arguments, **options)
            for ours, new in zip(compress(made, fresh), compress(tensors_of(again), fresh), strict=True):
                ours.copy_(new)


class Recorder:
    """Records tapes and counts.

    Attributes:
        recorded: Tapes made.
        replays: Times that any of them ran.
    """

    def __init__(self):
        self.recorded = self.replays = 0

    def __call__(self, function):
        tape = Tape(function)
        self.recorded += 1

        def replay():
            self.replays += 1
            tape()

        return replay
