"""Linear layers reordered once for the CPU's matrix kernels (oneDNN).

Decoding reads every weight for a handful of rows; a plain ``F.linear`` reorders (or strides badly over) the weight on
every call. The packed layer computes the same sums on the same weights, and a row's do not depend on the rows beside
it. The operators are private to torch, so they are probed once and the plain layer stays where they are missing.

A compiler cannot look into a packed weight: there the layer is the operator ``medusa::packed_linear``, which finds it
by number.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

logger = logging.getLogger(__name__)

ROWS_HINT = 16
FAST_ROWS = 4
"""oneDNN's kernels read a large weight fastest for 3 to 6 rows."""
LARGE_WEIGHT = 1 << 20
DTYPES = (torch.float32, torch.bfloat16)
PROBED_ROWS = 16

LinearFunction = Callable[[Tensor], Tensor]


class PackedLinear(nn.Module):
    """A frozen ``nn.Linear`` with its weight in oneDNN's own layout, and only there unless ``keep_weight``.

    Attributes:
        out_features: Columns of the output.
        weights: Numbers in the weight.
        least_rows: Fewer rows than this are computed among rows of zeros, see ``with_enough_rows``.
        handle: The layer's number for ``medusa::packed_linear``.
    """

    def __init__(self, linear: nn.Linear, keep_weight: bool = False) -> None:
        super().__init__()
        self.bias: Tensor | None = linear.bias
        if keep_weight:
            self.weight = linear.weight
        self.out_features, self.weights = linear.weight.shape[0], linear.weight.numel()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.least_rows = least_rows(*linear.weight.shape, linear.weight.dtype, torch.get_num_threads())
        self.handle = register(self)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., in]."""
        return call(self, x)

    def compute(self, x: Tensor) -> Tensor:
        """The same, outside of any compiler."""
        return with_enough_rows(self._product, x, self.least_rows)

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def dense_weight(self) -> Tensor:
        """A copy of the weight [out, in] in the usual layout."""
        weight: Tensor = self._packed.to_dense()
        return weight


def with_enough_rows(product: LinearFunction, x: Tensor, least: int) -> Tensor:
    """``product(x)``, for fewer than ``least`` rows of x [..., in] among rows of zeros."""
    rows = x.shape[:-1].numel()
    if rows >= least:
        return product(x)
    padded = nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, least - rows))
    return product(padded)[:rows].view(*x.shape[:-1], -1)


@cache
@torch.no_grad()
def least_rows(columns: int, width: int, dtype: torch.dtype, threads: int) -> int:
    """With how many rows at least a layer [columns, width] is computed: 1, or ``FAST_ROWS``.

    A few rows may take another kernel with another order of sums, and a row alone then differs from the same row among
    others. That is tried out once per shape on sums whose terms cancel: what is left is the rounding, order and all.
    A large weight is always read by ``FAST_ROWS``.
    """
    if columns * width >= LARGE_WEIGHT:
        return FAST_ROWS
    part, half = torch.sin(torch.arange(columns * (width // 2)).float()).view(columns, -1), width // 2
    x = torch.cos(torch.arange(PROBED_ROWS * half).float()).view(PROBED_ROWS, -1)
    weight, rows = (
        pad(both, (0, width - 2 * half)).to(dtype)
        for both in (torch.cat([part, part.flip(1)], 1), torch.cat([x, -x.flip(1)], 1))
    )
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    expected, *few = (
        torch.ops.mkldnn._linear_pointwise(rows[:count], packed, None, "none", [], "")
        for count in (PROBED_ROWS, *range(1, FAST_ROWS))
    )
    return 1 if all(torch.equal(out, expected[: len(out)]) for out in few) else FAST_ROWS


class Opaque(Protocol):
    """A linear layer that a compiler cannot look into."""

    handle: int
    out_features: int

    def compute(self, x: Tensor) -> Tensor:
        """Output [..., out] for x [..., in]."""


_numbers = itertools.count()
_layers: WeakValueDictionary[int, Opaque] = WeakValueDictionary()
_library = torch.library.Library("medusa", "FRAGMENT")
_library.define("packed_linear(Tensor x, int handle, int out_features) -> Tensor")
_library.impl("packed_linear", lambda x, handle, out_features: _layers[handle].compute(x), "CPU")
_library.impl("packed_linear", lambda x, handle, out_features: x.new_empty(*x.shape[:-1], out_features), "Meta")


def register(layer: Opaque) -> int:
    """A number for the layer, by which ``medusa::packed_linear`` finds it as long as it lives."""
    handle = next(_numbers)
    _layers[handle] = layer
    return handle


def call(layer: Opaque, x: Tensor) -> Tensor:
    """The layer's output: computed at once, or left to an operator where a compiler is looking."""
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.medusa.packed_linear(x, layer.handle, layer.out_features)
        return out
    return layer.compute(x)


def find(handle: int) -> Opaque:
    """The layer of that number."""
    return _layers[handle]


def stack(layers: Sequence[PackedLinear]) -> PackedLinear:
    """One layer whose output is that of all the layers side by side."""
    weight = torch.cat([part.dense_weight() for part in layers])
    biases: list[Tensor] = [weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in layers]
    return PackedLinear(_linear(weight, torch.cat(biases) if any(part.bias is not None for part in layers) else None))


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> LinearFunction:
    """``x -> x @ weight.T + bias`` for frozen weights [out, in], packed where that is possible."""
    linear = _linear(weight, bias)
    module = PackedLinear(linear) if _packable(linear) else linear
    return module.forward  # a function: assigned to a module's attribute it adds nothing to its state


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


@cache
def available(dtype: torch.dtype) -> bool:
    """Whether this torch has the operators on this CPU and they compute a linear layer."""
    try:
        linear, rows = nn.Linear(32, 48).to(dtype), torch.linspace(-1, 1, 160).view(5, 32).to(dtype)
        with torch.no_grad():
            return torch.allclose(
                PackedLinear(linear)(rows), linear(rows), atol=1e-5 if dtype == torch.float32 else 0.05
            )
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info("plain linear layers: oneDNN packing is not available (%s)", error)
        return False


def pack_linears(module: nn.Module, keep: nn.Module | None = None) -> int:
    """Replace every plain ``nn.Linear`` below ``module`` in place; returns how many were replaced.

    Small ones too: sums of the usual kernels depend on how many rows there are.

    Args:
        module: Any model.
        keep: A layer below it whose plain weight is still read by others (the output layer); it has both.
    """
    return replace_linears(module, lambda linear: PackedLinear(linear, keep_weight=linear is keep))


def replace_linears(module: nn.Module, replacement: Callable[[nn.Linear], nn.Module]) -> int:
    """Replace every plain ``nn.Linear`` below ``module`` in place; returns how many were replaced."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _packable(child):
                setattr(parent, name, replacement(child))
                count += getattr(parent, name) is not child
    return count


def _packable(linear: nn.Linear) -> bool:
    """Plain layers with plain weights on a CPU only: a subclass of either (quantised, say) computes something else."""
    weight = linear.weight
    plain = type(linear) is nn.Linear and type(weight) is nn.Parameter
    return plain and weight.device.type == "cpu" and weight.dtype in DTYPES and available(weight.dtype)
