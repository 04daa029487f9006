"""What packed layers compute, compared with plain layers of the same weights."""

import torch
from torch import nn

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.cpu.experts import use_experts
from medusa.cpu.native import NativeLinear, has_tiles, rows_are_whole, use_kernels
from medusa.cpu.packed import RUN, PackedLinear
from medusa.loading.self_test import choose_decoding, fuse


def same(ours, theirs, error=0.05):
    """Whether results of packed and of expanded weights are equal with a matrix unit; without one weights are not
    rounded to bfloat16, and results are near."""
    ours, theirs = ours.float(), theirs.float()
    return torch.equal(ours, theirs) if has_tiles() else (ours - theirs).norm() < error * theirs.norm()


def with_heads(model, tokenizer):
    """A model of bfloat16 as it is decoded, with random heads."""
    use_kernels(model)
    use_experts(model)
    base = fuse(choose_decoding(BaseModel(model, tokenizer)))
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 3)).bfloat16()
    heads.init_from_base(base.lm_head_weight)
    return MedusaModel(base, heads)


def in_whole_numbers(x):
    """Rows [..., I] as their runs' whole numbers of two bytes hold them, float64."""
    runs = nn.functional.pad(x.double(), (0, -x.shape[-1] % RUN)).unflatten(-1, (-1, RUN))
    scale = 2.0 ** (runs.abs().amax(-1, keepdim=True).log2().floor() - 14)
    whole = (runs / scale).round().clamp(max=127 * 257) * scale
    return whole.where(scale > 0, 0).flatten(-2)[..., : x.shape[-1]]


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
        rows = in_whole_numbers(x) if rows_are_whole() else x.double()
        sums, sizes = rows @ weight.double().T + bias.double(), rows.abs() @ weight.double().abs().T
        assert ((every.double() - sums).abs() <= 2**-8 * sums.abs() + 2e-6 * sizes).all()
    for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 40):
        assert torch.equal(layer(x[:rows]), every[:rows])
