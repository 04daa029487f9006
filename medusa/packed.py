"""Linear layers reordered once for the CPU's matrix kernels (oneDNN).

Decoding reads every weight for a handful of rows; a plain ``F.linear`` reorders (or strides badly over) the weight on
every call. The packed layer computes the same sums on the same weights. The operators are private to torch, so they are
probed once and the plain layer stays where they are missing.
"""

import logging
from functools import cache

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ROWS_HINT = 16
MIN_WEIGHTS = 1 << 14
DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A frozen ``nn.Linear`` with its weight in oneDNN's own layout.

    Attributes:
        weight: The original [out, in] weight; training and export still read it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.out_features = linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., in]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


@cache
def available() -> bool:
    """Whether this torch has the operators and they compute a linear layer."""
    try:
        linear, rows = nn.Linear(32, 48), torch.linspace(-1, 1, 160).view(5, 32)
        with torch.no_grad():
            return torch.allclose(PackedLinear(linear)(rows), linear(rows), atol=1e-5)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info("plain linear layers: oneDNN packing is not available (%s)", error)
        return False


def pack_linears(module: nn.Module) -> int:
    """Replace every large enough ``nn.Linear`` below ``module`` in place; returns how many were replaced."""
    if not available():
        return 0
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _worth_packing(child):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def _worth_packing(linear: nn.Linear) -> bool:
    """Plain layers only: a subclass (quantised, say) computes something else."""
    weight = linear.weight
    return type(linear) is nn.Linear and weight.numel() >= MIN_WEIGHTS and weight.dtype in DTYPES
