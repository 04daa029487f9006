"""A stand-in for CUDA graphs on a CPU: the operators of a function, repeated on the very same memory.

Like a graph it keeps addresses and the numbers that Python computed, and nothing else: a function whose shapes or
choices depend on the host writes wrong text from its second run on, and one that waits for a value cannot be recorded.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa.cpu import native

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.equal}


def tensors_of(*values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


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
        options = options or {}
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = arguments[place] if place < len(arguments) else options[argument.name]
                for tensor in written if isinstance(written, list) else [written]:
                    if address(tensor) not in self.before:
                        storage = tensor.untyped_storage()
                        self.before[address(tensor)] = storage, storage.clone()
        out = super().__torch_dispatch__(function, types, arguments, options)
        self.calls.append((function, arguments, options, out))
        return out

    def __call__(self):
        for function, arguments, options, out in self.calls:
            known = {address(tensor) for tensor in tensors_of(arguments, options)}
            again = function(*arguments, **options)
            for ours, new in zip(tensors_of(out), tensors_of(again), strict=True):
                if address(ours) not in known:  # neither a view nor changed in place
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
