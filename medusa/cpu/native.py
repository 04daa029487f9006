"""The C++ kernels of ``medusa/cpu/kernels``: a linear layer, and a decoder's whole pass in one call.

Both read torch's weights in place. A row's results are equal bit by bit, whatever the other rows are.
"""

import ctypes
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from medusa.cpu import build

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the kernels, in the order of ``NumberType`` of vectors.h."""

LinearFunction = Callable[[Tensor], Tensor]


class LinearStruct(ctypes.Structure):
    """``Linear`` of weights.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64),
        ("packing", ctypes.c_int64), ("runs", ctypes.c_int64),
    ]  # fmt: skip

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        inputs: int | None = None,
        outputs: int | None = None,
        packing: int = 0,
        runs: int = 0,
    ) -> "LinearStruct":
        """The struct of a layer with these tensors, which must outlive it.

        Args:
            weight: The weight; contiguous.
            bias: Bias of the outputs.
            inputs: Number of inputs; None = columns of the weight.
            outputs: Number of outputs; None = rows of the weight.
            packing: Packing of the weight (``medusa.cpu.packed``).
            runs: Runs of a block.
        """
        assert weight.is_contiguous(), "rows of a weight follow each other"
        bias_at = None if bias is None else bias.data_ptr()
        sizes = outputs or len(weight), inputs or weight.shape[1]
        return cls(weight.data_ptr(), bias_at, *sizes, packing, runs)


@cache
def kernels() -> ctypes.CDLL:
    """The library; built at the first call if necessary.

    Raises:
        NativeUnavailableError: The library cannot be built or loaded.
    """
    library = build.load(build.SOURCE)
    # OpenMP's threads are not in a forked child, where the next call, ours or torch's, would wait for them for ever.
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    arguments: dict[str, Sequence[Any]] = {
        "linear": [ctypes.c_int, ctypes.c_int, ctypes.POINTER(LinearStruct), number, pointer, pointer],
        "argmax": [ctypes.c_int, ctypes.c_int, number, number, pointer, pointer],
        "keep": [number, pointer, pointer, number, number, *[pointer] * 4, number, number],
        "reorder": [ctypes.c_int, ctypes.POINTER(LinearStruct), pointer],
        "expand": [ctypes.c_int, ctypes.POINTER(LinearStruct), pointer],
        "pass": [pointer],
        "experts": [pointer],
        "draft": [pointer],
        "plant": [pointer, pointer, pointer],
        "grow": [pointer, ctypes.c_int, number, number, pointer, pointer],
        "choose": [pointer, number],
        "lookup": [pointer],
        "remember": [pointer, pointer, number],
        "losses": [pointer],
        "recur": [pointer],
        "convolve": [pointer],
        "draw": [pointer],
        "accept": [pointer],
        "depths": [number, number, pointer, pointer],
        "gumbel": [number, pointer, number, pointer, pointer],
        "keys": [number, number, pointer, pointer, number, pointer],
    }
    for name, types in arguments.items():
        declare(getattr(library, f"medusa_{name}"), types)
    library.medusa_flavour.restype = ctypes.c_char_p
    logger.info("CPU kernels: %s", library.medusa_flavour().decode())
    return library


def declare(function: Any, arguments: Sequence[Any]) -> None:
    """Set the argument types of a kernel, and check its returned ``Outcome`` (kernels.cpp)."""
    function.restype, function.argtypes, function.errcheck = ctypes.c_int, arguments, _check


def _check(outcome: int, *_: object) -> None:
    if outcome == 1:
        raise MemoryError("a CPU kernel ran out of memory; give fewer or shorter prompts at a time")
    if outcome == 2:
        raise IndexError("a draft or a prompt holds a token id that the base does not have; correct its source")


def number_type(dtype: torch.dtype) -> int:
    """The kernels' number of a dtype of ``DTYPES``."""
    return DTYPES.index(dtype)


@cache
def has_tiles() -> bool:
    """Whether a matrix unit computes linear layers in bfloat16 (``kernels/tiles.h``)."""
    return available() and kernels().medusa_flavour().startswith(b"AMX")


def rows_are_whole() -> bool:
    """Whether rows that meet packed weights are brought to whole numbers of 16 bits (``kernels/whole.h``)."""
    flavour = kernels().medusa_flavour() if available() else b""
    return flavour.startswith(b"AVX2") or b" and VNNI" in flavour


@cache
def packing_pays() -> bool:
    """Whether packed weights (``medusa.cpu.packed``) are faster than expanded ones: with AVX2 and what is above it."""
    return available() and kernels().medusa_flavour().startswith((b"AMX", b"AVX"))


@cache
def available() -> bool:
    """Whether the kernels run here; if not, the reason is logged once."""
    try:
        kernels()
    except build.NativeUnavailableError as error:
        logger.warning("no C++ kernels on this CPU, decoding is slower: %s", error)
        return False
    return True


class NativeLinear(nn.Linear):
    """A frozen ``nn.Linear``, computed by the kernel. It shares the weights of the original layer."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., in] of the weight's dtype; no gradient passes through."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for x [..., in], by the kernel."""
    return LinearKernel(LinearStruct.of(weight, bias), weight.dtype, [weight, bias])(x)


class LinearKernel:
    """``linear`` with fixed weights, which must not move; arguments that do not change are prepared once.

    Args:
        layer: The struct that the kernel reads.
        dtype: Dtype of rows and outputs.
        alive: The layer's tensors, which are kept alive.
    """

    def __init__(self, layer: LinearStruct, dtype: torch.dtype, alive: Sequence[Tensor | None]) -> None:
        self._layer, self.dtype, self._alive = layer, dtype, alive
        self._compute, self._type = kernels().medusa_linear, number_type(dtype)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> "LinearKernel":
        """The kernel of plain weights."""
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        return cls(LinearStruct.of(weight, bias), weight.dtype, [weight, bias])

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [..., out] for x [..., in] of the layer's dtype."""
        *rows, inputs = x.shape
        layer = self._layer
        if x.dtype != self.dtype or inputs != layer.inputs:
            raise RuntimeError(f"rows {list(x.shape)} of {x.dtype} do not fit {layer.inputs} inputs of {self.dtype}")
        x, out = x.contiguous(), x.new_empty(*rows, layer.outputs)
        threads = torch.get_num_threads()
        self._compute(self._type, threads, layer, math.prod(rows), x.data_ptr(), out.data_ptr())
        return out


def native_linear(weight: Tensor, bias: Tensor | None = None) -> LinearFunction:
    """``x -> x @ weight.T + bias`` for frozen weights [out, in]; by the kernel if it supports them."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().contiguous(), requires_grad=False)
    module = NativeLinear(linear) if _plain(linear) and available() else linear
    return module.forward  # a function: as a module's attribute it adds nothing to the module's state


def use_kernels(module: nn.Module) -> int:
    """Let the kernel compute every plain ``nn.Linear`` below ``module``, in place; returns their number."""
    return replace_linears(module, lambda linear: NativeLinear(linear) if available() else linear)


def replace_linears(module: nn.Module, replacement: Callable[[nn.Linear], nn.Module]) -> int:
    """Replace every plain ``nn.Linear`` below ``module`` in place; returns their number."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _plain(child):
                setattr(parent, name, replacement(child))
                count += getattr(parent, name) is not child
    return count


def is_plain(layer: object) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer with plain weights; subclasses, for example quantised ones, are not."""
    return type(layer) in (nn.Linear, NativeLinear) and type(layer.weight) is nn.Parameter  # type: ignore[attr-defined]


def _plain(linear: nn.Linear) -> bool:
    """Whether the kernel can replace this layer."""
    weight = linear.weight
    known = type(linear) is nn.Linear and is_plain(linear) and weight.is_contiguous()
    return known and weight.device.type == "cpu" and weight.dtype in DTYPES


def reads(x: Tensor) -> bool:
    """Whether the kernels support such a tensor, and run here."""
    return x.is_cpu and x.dtype in DTYPES and available()


def reads_indices(*tensors: Tensor) -> bool:
    """Whether the kernels support trees with these indices: int64 on a CPU."""
    return all(x.is_cpu and x.dtype == torch.int64 for x in tensors) and available()


def addresses(tensors: Iterable[Tensor | None]) -> Any:
    """An array of the addresses of these tensors, null for None; the tensors must outlive its use."""
    found = [None if x is None else x.data_ptr() for x in tensors]
    return (ctypes.c_void_p * len(found))(*found)


def keep_rows(
    buffers: Sequence[Tensor], path_SA: Tensor, counts_S: Tensor, lengths_S: Tensor, table_SW: Tensor, size: int
) -> None:
    """Move keys and values of accepted paths to the ends of their texts, see ``medusa.cache.commit``.

    Args:
        buffers: Keys and values of all layers, on a CPU: [blocks, size, ...].
        path_SA: int64, nodes of the paths; entry i is at least i.
        counts_S: int64, number of nodes of each path.
        lengths_S: int64, number of cached positions before them.
        table_SW: int64, blocks of each sequence.
        size: Positions of a block.
    """
    path, counts, lengths = path_SA.contiguous(), counts_S.contiguous(), lengths_S.contiguous()
    memory = addresses(buffers)
    sizes = (ctypes.c_int64 * len(buffers))(*(buffer.stride(1) * buffer.element_size() for buffer in buffers))
    kernels().medusa_keep(
        len(buffers), memory, sizes, *path.shape, path.data_ptr(), counts.data_ptr(), lengths.data_ptr(),
        table_SW.data_ptr(), table_SW.stride(0), size,
    )  # fmt: skip
