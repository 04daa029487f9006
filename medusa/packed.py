"""Linear layers reordered once for the CPU's matrix kernels (oneDNN).

Decoding reads every weight for a handful of rows; a plain ``F.linear`` reorders (or strides badly over) the weight on
every call. The packed layer computes the same sums on the same weights. The operators are private to torch, so they are
probed once and the plain layer stays where they are missing.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ROWS_HINT = 16
MIN_WEIGHTS = 1 << 14
DTYPES = (torch.float32, torch.bfloat16)

LinearFunction = Callable[[Tensor], Tensor]


class PackedLinear(nn.Module):
    """A frozen ``nn.Linear`` with its weight in oneDNN's own layout, and only there unless ``keep_weight``."""

    def __init__(self, linear: nn.Linear, keep_weight: bool = False) -> None:
        super().__init__()
        self.bias = linear.bias
        if keep_weight:
            self.weight = linear.weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., in]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> LinearFunction:
    """``x -> x @ weight.T + bias`` for frozen weights [out, in], packed where that is worth it."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    module = PackedLinear(linear) if weight.device.type == "cpu" and _worth_packing(linear) else linear
    return module.forward  # a function: assigned to a module's attribute it adds nothing to its state


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
    """Replace every large enough ``nn.Linear`` below ``module`` in place; returns how many were replaced.

    Args:
        module: Any model.
        keep: A layer below it whose plain weight is still read by others (the output layer); it has both.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _worth_packing(child):
                setattr(parent, name, PackedLinear(child, keep_weight=child is keep))
                count += 1
    return count


def _worth_packing(linear: nn.Linear) -> bool:
    """Plain layers with plain weights only: a subclass of either (quantised, say) computes something else."""
    weight = linear.weight
    plain = type(linear) is nn.Linear and type(weight) is nn.Parameter
    return plain and weight.numel() >= MIN_WEIGHTS and weight.dtype in DTYPES and available(weight.dtype)
