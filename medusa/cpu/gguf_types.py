"""Types of weights in GGUF files: the layout of a block of bytes, as in llama.cpp (ggml-common.h).

Legend: P panels of 16 outputs, K runs of 32 inputs, B blocks, F factors, C codes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """The parts of a weight.

    Attributes:
        packing: A key of ``medusa.cpu.packed.FORMS``.
        factors: [P, 16, B, F] factors of the blocks.
        numbers: uint8 [P, 16, K, 32] integers; int8 if they have 8 bits.
        codes: [P, 16, K, C] codes of the runs.
    """

    packing: int
    factors: Tensor
    numbers: Tensor
    codes: Tensor | None = None


def _half(blocks: Tensor, *places: int) -> Tensor:
    """Read float16 [..., F] at these offsets of blocks [..., bytes]."""
    return torch.cat([blocks[..., place : place + 2] for place in places], -1).contiguous().view(torch.float16)


def _nibbles(x: Tensor) -> Tensor:
    """Unpack integers [..., 2 n] from bytes [..., n]; byte i holds integers i and i + n."""
    return torch.cat([x & 15, x >> 4], -1)


def _fifth(bits: Tensor) -> Tensor:
    """Unpack the fifth bits: uint8 [..., 32], 16 if the bit in 4 bytes [..., 4] is set."""
    return (bits[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Parts:
    scale = _half(blocks, 0)
    return Parts(1, torch.cat([scale, scale * -8], -1), _nibbles(blocks[..., 2:]))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(1, _half(blocks, 0, 2), _nibbles(blocks[..., 4:]))


def _q5_0(blocks: Tensor) -> Parts:
    scale = _half(blocks, 0)
    return Parts(2, torch.cat([scale, scale * -16], -1), _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6]))


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(2, _half(blocks, 0, 2), _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8]))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(3, _half(blocks, 0), blocks[..., 2:].view(torch.int8))


def mx_parts(exponents: Tensor, numbers: Tensor) -> Parts:
    """The parts of MXFP4: exponents uint8 [P, 16, K, 1] of at least 2 where numbers are not 0, as these count twice."""
    return Parts(9, (exponents.clamp(min=2) - 1).view(torch.float8_e8m0fnu), numbers)


def _mxfp4(blocks: Tensor) -> Parts:
    return mx_parts(blocks[..., :1], _nibbles(blocks[..., 1:]))


def _six_bits(blocks: Tensor) -> Tensor:
    """uint8 [..., 8 B, 2]: scales and minima of a superblock's eight runs."""
    first, second, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)
    return torch.stack([scales, minima], -1).flatten(-3, -2)


def _pairs(x: Tensor) -> Tensor:
    """Unpack 4-bit integers [..., 8, 32]: each 32 of 128 bytes hold two runs."""
    both = x.unflatten(-1, (4, 32))
    return torch.stack([both & 15, both >> 4], -2).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> Parts:
    return Parts(4, _half(blocks, 0, 2), _pairs(blocks[..., 16:]).flatten(-3, -2), _six_bits(blocks))


def _q5_k(blocks: Tensor) -> Parts:
    fifth = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [..., 8, 32]
    return Parts(5, _half(blocks, 0, 2), (_pairs(blocks[..., 48:]) | fifth << 4).flatten(-3, -2), _six_bits(blocks))


def _q6_k(blocks: Tensor) -> Parts:
    low, high = blocks[..., :128].unflatten(-1, (2, 2, 32)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    lower = torch.stack([low & 15, low >> 4], -3).flatten(-3, -2)  # [..., half, run, 32]
    upper = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    numbers = ((lower | upper << 4).to(torch.int8) - 32).flatten(-4, -2)
    codes = blocks[..., 192:208].view(torch.int8).unflatten(-1, (8, 2)).flatten(-3, -2)
    return Parts(6, _half(blocks, 208), numbers, codes)


KINDS: dict[str, tuple[Callable[[Tensor], Parts], int, int]] = {
    "Q4_0": (_q4_0, 32, 18),
    "Q4_1": (_q4_1, 32, 20),
    "Q5_0": (_q5_0, 32, 22),
    "Q5_1": (_q5_1, 32, 24),
    "Q8_0": (_q8_0, 32, 34),
    "MXFP4": (_mxfp4, 32, 17),
    "Q4_K": (_q4_k, 256, 144),
    "Q5_K": (_q5_k, 256, 176),
    "Q6_K": (_q6_k, 256, 210),
}
"""By type: the function that reads blocks [P, 16, B, bytes], and the numbers of weights and bytes of a block."""
