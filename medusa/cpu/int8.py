"""LOSSY: linear layers with 8-bit weights, for CPUs. The result is another model than the base.

Weights are rounded once, with a scale per output column. Activations are rounded in each pass, with a scale per group
of ``GROUP`` values of a row (kernels/int8.h). Products of integers are exact, so a row's result does not depend on
other rows: with respect to the rounded model, trees and batches are as lossless as with plain weights.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from medusa.cpu.native import DTYPES, available, linear, replace_linears

GROUP = 128
"""Values of a row that share a scale; as in kernels/int8.h."""
LARGEST = 127
ZERO = 128
"""Weights are stored as unsigned bytes with this offset, the form that the processor's dot products need."""


class Int8Linear(nn.Module):
    """A frozen ``nn.Linear`` rounded to 8 bits: half the bytes of bfloat16, and products several times as fast.

    Attributes:
        in_features: Number of inputs.
        out_features: Number of outputs.
        rounded: uint8 [out, in] weights, ``ZERO`` for 0; padded to whole groups.
        scales: float32 [out], the value of 1 in each column.
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
        """``x @ weight.T + bias`` for x [..., in] of the bias's dtype; the result has the same dtype."""
        return linear(x, self.rounded, self.bias, self.scales)


def round_linears(module: nn.Module, keep: nn.Module | None = None) -> int:
    """Round every ``nn.Linear`` below ``module`` in place; returns their number.

    Args:
        module: Any model on a CPU, in a dtype that the kernels support.
        keep: A layer that is not rounded: the output layer, whose rounding errors would directly change the text.

    Raises:
        ValueError: The kernels do not run on this machine, or there is no linear layer.
    """
    if not available():
        raise ValueError("weights of 8 bits (int8) need the C++ kernels, which are not available here; leave int8 out")
    count = replace_linears(module, lambda linear: linear if linear is keep else Int8Linear(linear))
    if not count:
        raise ValueError(f"int8 rounds linear layers in {DTYPES} and there are none; leave int8 out")
    return count
