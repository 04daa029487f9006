"""LOSSY: linear layers with weights of 8 bits, for CPUs. The model that they make is another one than its base.

Weights are rounded once, per output column; every row of activations is rounded by its own largest value when it comes.
Products of whole numbers are exact, so a row's result does not depend on the rows beside it: towards the rounded model
itself, trees and batches are as lossless as in half precision. (What is nearly equal, after attention over other rows,
may be rounded to different numbers.)
"""

import logging
from functools import cache

import torch
from torch import Tensor, nn

from medusa.cpu.native import replace_linears

logger = logging.getLogger(__name__)

MIN_WEIGHTS = 1 << 21
"""Smaller layers stay as they are: rounding their activations takes longer than reading fewer bytes saves."""
LARGEST = 127
ZERO = 128
"""Activations travel as unsigned bytes with this offset, the form that the processor's dot products take."""


class Int8Linear(nn.Module):
    """A frozen ``nn.Linear`` rounded to 8 bits: half the bytes of bfloat16 to read.

    Attributes:
        out_features: Columns of the output.
        weights: Numbers in the weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        rounded = (weight / scales[:, None]).round().to(torch.int8)
        self.bias: Tensor | None = linear.bias
        self.out_features, self.weights = len(weight), weight.numel()
        self._scales, self._zeros = scales, torch.zeros(len(weight), dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., in], in x's dtype."""
        rows = x.float()
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        whole = ((rows / scale).round_() + ZERO).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, ZERO, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        out = out * scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


@cache
def available() -> bool:
    """Whether this torch has the operators on this CPU and they compute a linear layer."""
    try:
        linear, rows = nn.Linear(64, 48), torch.linspace(-1, 1, 320).view(5, 64)
        with torch.no_grad():
            return torch.allclose(Int8Linear(linear)(rows), linear(rows), atol=0.05)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info("weights of 8 bits are not available (%s)", error)
        return False


def round_linears(module: nn.Module, keep: nn.Module | None = None) -> int:
    """Round every ``nn.Linear`` of at least ``MIN_WEIGHTS`` below ``module`` in place; returns how many.

    Args:
        module: Any model on a CPU.
        keep: A layer that stays as it is: the output layer, where errors of rounding would reach the text unfiltered.

    Raises:
        ValueError: This machine has no kernels for it, or no layer is that large.
    """
    if not available():
        raise ValueError("weights of 8 bits (int8) need oneDNN's kernels, which this torch has not; leave int8 out")

    def rounded(linear: nn.Linear) -> nn.Module:
        return linear if linear is keep or linear.weight.numel() < MIN_WEIGHTS else Int8Linear(linear)

    count = replace_linears(module, rounded)
    if not count:
        raise ValueError(f"int8 rounds layers of at least {MIN_WEIGHTS:,} weights and there are none; leave int8 out")
    return count
