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
        linear = nn.Linear(32, 48)
        x = torch.randn(5, 32)
        with torch.no_grad():
            return torch.allclose(PackedLinear(linear)(x), linear(x), atol=1e-5)
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
            supported = child.weight.dtype in (torch.float32, torch.bfloat16) if type(child) is nn.Linear else False
            if supported and child.weight.numel() >= MIN_WEIGHTS:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
