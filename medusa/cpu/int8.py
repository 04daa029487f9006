"""LOSSY: linear layers with weights of 8 bits, for CPUs. The model that they make is another one than its base.

Weights are rounded once, per output column; rows of activations when they come, every group of ``GROUP`` numbers by its
own largest one (kernels/int8.h). Products of whole numbers are exact, so a row's result does not depend on the rows
beside it: towards the rounded model itself, trees and batches are as lossless as with weights as they are.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from medusa.cpu.native import DTYPES, available, linear, replace_linears

GROUP = 128
"""Numbers of a row that share a scale; as in kernels/int8.h."""
LARGEST = 127
ZERO = 128
"""Weights travel as unsigned bytes with this offset, the form that the processor's dot products take."""


class Int8Linear(nn.Module):
    """A frozen ``nn.Linear`` rounded to 8 bits: half the bytes of bfloat16 to read, and products several times as fast.

    Attributes:
        in_features: Numbers in a row.
        out_features: Columns of the output.
        rounded: uint8 [out, in], ``ZERO`` for 0; whole groups.
        scales: float32 [out], what 1 stands for in each column.
        bias: [out] or None.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        whole = (weight / self.scales[:, None]).round() + ZERO
        self.rounded = pad(whole, (0, -self.in_features % GROUP), value=ZERO).to(torch.uint8)
        self.bias: Tensor | None = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., in] of the bias's dtype, in it."""
        return linear(x, self.rounded, self.bias, self.scales)


def round_linears(module: nn.Module, keep: nn.Module | None = None) -> int:
    """Round every ``nn.Linear`` below ``module`` in place; returns how many.

    Args:
        module: Any model on a CPU, in a dtype of the kernels.
        keep: A layer that stays as it is: the output layer, where errors of rounding would reach the text unfiltered.

    Raises:
        ValueError: This machine has no kernels for it, or there is no such layer.
    """
    if not available():
        raise ValueError("weights of 8 bits (int8) need the C++ kernels, which are not available here; leave int8 out")
    count = replace_linears(module, lambda linear: linear if linear is keep else Int8Linear(linear))
    if not count:
        raise ValueError(f"int8 rounds linear layers in {DTYPES} and there are none; leave int8 out")
    return count
