"""What packed layers compute, compared with plain layers of the same weights."""

import torch
from torch import nn

from medusa.cpu.native import NativeLinear, has_tiles
from medusa.cpu.packed import PackedLinear


def same(ours, theirs, error=0.05):
    """Whether results of packed and of expanded weights are equal with a matrix unit; without one weights are not
    rounded to bfloat16, and results are near."""
    ours, theirs = ours.float(), theirs.float()
    return torch.equal(ours, theirs) if has_tiles() else (ours - theirs).norm() < error * theirs.norm()


def check_sums(packed, weight):
    """A packed layer computes what a plain one does whose weights are those of the file, float32 [O, I]."""
    bias = torch.randn(len(weight)).bfloat16()
    plain = nn.Linear(weight.shape[1], len(weight), dtype=torch.bfloat16).requires_grad_(False)
    plain.weight.copy_(weight)
    plain.bias.copy_(bias)
    layer, x = PackedLinear(packed, bias), torch.randn(200, weight.shape[1]).bfloat16()
    every = layer(x)
    if has_tiles():
        assert torch.equal(every, NativeLinear(plain)(x))
    else:
        sums, sizes = x.double() @ weight.double().T + bias.double(), x.double().abs() @ weight.double().abs().T
        assert ((every.double() - sums).abs() <= 2**-8 * sums.abs() + 2e-6 * sizes).all()
    for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 40):
        assert torch.equal(layer(x[:rows]), every[:rows])
