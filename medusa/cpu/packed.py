"""Linear layers whose weights stay packed as GGUF files hold them: a third of the bytes of bfloat16 to read.

Nothing is lost by it: a block of weights is expanded to the numbers that an expanded model has while it is in a core's
cache, and sums are the same bit by bit (kernels/weights.h).

Legend: O outputs, I inputs, P panels of 16 outputs, K runs of 32 inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from medusa.cpu.native import LinearKernel, LinearStruct

PANEL, RUN = 16, 32
"""Outputs that stand together, and inputs that share a scale; as in kernels/weights.h."""
FOUR_BITS, EIGHT_BITS, WIDE_FOUR_BITS, WIDE_EIGHT_BITS = 1, 2, 3, 4
"""``Packing`` of kernels/weights.h."""


@dataclass(frozen=True)
class Packed:
    """A packed weight [O, I].

    Attributes:
        parts: uint8 [P, K, bytes], ``FourBits`` or ``EightBits`` of kernels/weights.h.
        packing: Which of them.
        outputs: O; what is behind it in the last panel is 0.
    """

    parts: Tensor
    packing: int
    outputs: int

    @property
    def inputs(self) -> int:
        """I."""
        return self.parts.shape[1] * RUN

    @classmethod
    def of(cls, blocks: Tensor, kind: str) -> "Packed":
        """Arranged for the kernels.

        Args:
            blocks: uint8 [O, bytes], rows as a GGUF file holds them.
            kind: The type's name there, one of ``KINDS``.
        """
        arrange, _, size, packing = KINDS[kind]
        outputs = len(blocks)
        panels = pad(blocks, (0, 0, 0, -outputs % PANEL)).view(-1, PANEL, blocks.shape[1] // size, size)
        return cls(arrange(panels.transpose(1, 2)), packing, outputs)

    @classmethod
    def of_groups(cls, numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> "Packed | None":
        """Weights (numbers - zeros) * scales; None where no packing holds exactly these.

        Args:
            numbers: uint8 [O, I].
            scales: [O, G], of groups of inputs that are of one size and in order.
            zeros: uint8 [O, G].
            bits: Of a number, 4 or 8.
        """
        (outputs, inputs), groups, scales = numbers.shape, scales.shape[1], scales.float()
        if inputs % (RUN * groups):
            return None
        fit, offsets = (0, 0, 0, -outputs % PANEL), -scales * zeros
        half = torch.equal(scales.half().float(), scales)

        def runs(x: Tensor) -> Tensor:
            """[P, K, 16] of [O, G]."""
            x = pad(x.repeat_interleave(inputs // RUN // groups, 1), fit)
            return x.view(-1, PANEL, inputs // RUN).transpose(1, 2)

        if bits == 4:
            # Products of 16 bits and 4 are exact in float32, and so is a sum of two that is one.
            if not half and not torch.equal(scales.bfloat16().float(), scales):
                return None
            half = half and torch.equal(offsets.half().float(), offsets)
            to, packing = (torch.float16, FOUR_BITS) if half else (torch.float32, WIDE_FOUR_BITS)
            panels = pad(numbers, fit).view(-1, PANEL, inputs // RUN, RUN).transpose(1, 2)
            return cls(_four_bits(runs(scales).to(to), runs(offsets).to(to), panels), packing, outputs)
        signed = numbers.view(outputs, groups, -1).short() - zeros[..., None].short()
        if signed.amin() < -128 or signed.amax() > 127:
            return None
        panels = pad(signed.to(torch.int8).flatten(1), fit).view(-1, PANEL, inputs // RUN, RUN).transpose(1, 2)
        if half:
            return cls(_bytes(runs(scales).half(), panels), EIGHT_BITS, outputs)
        return cls(_bytes(runs(scales)[:, :, None].repeat(1, 1, 2, 1), panels), WIDE_EIGHT_BITS, outputs)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """[O, I] of that dtype, as a model whose weights are expanded when it is loaded has it."""
        panels, runs, _ = self.parts.shape
        wide = self.packing in (WIDE_FOUR_BITS, WIDE_EIGHT_BITS)
        both = 2 if self.packing != EIGHT_BITS else 1  # scales and offsets, or the scales of two halves
        size = both * PANEL * (4 if wide else 2)
        found = self.parts[..., :size].contiguous().view(torch.float32 if wide else torch.float16).float()
        first, last = found.unflatten(-1, (both, PANEL, 1)).movedim(2, 0)[[0, -1]]
        if self.packing in (FOUR_BITS, WIDE_FOUR_BITS):
            nibbles = self.parts[..., size:].unflatten(-1, (PANEL, 8, 2))
            four = torch.stack([nibbles & 15, nibbles >> 4], -1)  # [P, K, 16, word, byte, nibble]
            numbers = four.movedim(3, -1).flatten(3).float() * first + last
        else:
            halves = self.parts[..., size:].view(torch.int8).unflatten(-1, (PANEL, 2, RUN // 2)).float()
            numbers = (halves * torch.stack([first, last], 3)).flatten(3)
        whole: Tensor = numbers.to(dtype).transpose(1, 2).reshape(panels * PANEL, runs * RUN)
        return whole[: self.outputs]


class PackedLinear(nn.Module):
    """A frozen linear layer with a packed weight, computed by the kernel.

    Args:
        packed: Its weight; the tensor must not move.
        dtype: Of the numbers that it stands for, and of what the layer reads.
        bias: [O] of that dtype, or None.
        weight: The expanded weight, where there is one anyway: tied embeddings.
    """

    def __init__(self, packed: Packed, dtype: torch.dtype, bias: Tensor | None = None, weight: Tensor | None = None):
        super().__init__()
        self.packed, self.dtype = packed, dtype
        self.in_features, self.out_features = packed.inputs, packed.outputs
        self.bias, self._weight = bias, weight
        layer = LinearStruct.of(packed.parts, bias, None, packed.inputs, packed.outputs, packed.packing)
        self.kernel = LinearKernel(layer, dtype, [packed.parts, bias])

    @property
    def weight(self) -> Tensor:
        """[O, I] expanded; where no tensor holds it already, that takes its time and memory."""
        return self.packed.expand(self.dtype) if self._weight is None else self._weight

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., I] of the layer's dtype; no gradient passes through."""
        return self.kernel(x)


def _bytes(*columns: Tensor) -> Tensor:
    """[P, K, bytes] of what stands together, [P, K, ...] each."""
    return torch.cat([column.contiguous().flatten(2).view(torch.uint8) for column in columns], -1)


def _four_bits(scales: Tensor, offsets: Tensor, numbers: Tensor) -> Tensor:
    """Of numbers [P, K, 16, 32] up to 15."""
    places = numbers.unflatten(-1, (2, 2, 8))
    words = torch.stack([places[..., half, 0, :] | places[..., half, 1, :] << 4 for half in (0, 1)], -1)
    return _bytes(scales, offsets, words)


def _nibbles(blocks: Tensor) -> Tensor:
    """Numbers [..., 32] of bytes that hold number i and i + 16."""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def _half(blocks: Tensor, place: int) -> Tensor:
    """float16 [...] at a place of blocks [..., bytes]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0]


def _runs(numbers: Tensor) -> Tensor:
    """[P, 8 K, 16, ...] of superblocks [P, K, 16, 8, ...], which hold eight runs each."""
    return numbers.movedim(3, 2).flatten(1, 2)


def _q4_0(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 0)
    return _four_bits(scales, scales * -8, _nibbles(blocks[..., 2:]))


def _q4_1(blocks: Tensor) -> Tensor:
    return _four_bits(_half(blocks, 0), _half(blocks, 2), _nibbles(blocks[..., 4:]))


def _q8_0(blocks: Tensor) -> Tensor:
    return _bytes(_half(blocks, 0), blocks[..., 2:])


def _q4_k(blocks: Tensor) -> Tensor:
    packed = blocks[..., 4:16].unflatten(-1, (3, 4))  # 6 bits of eight scales and of eight minima
    first, second, rest = packed.unbind(-2)
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1).float() * _half(blocks, 0).float()[..., None]
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1).float() * _half(blocks, 2).float()[..., None]
    pairs = blocks[..., 16:].unflatten(-1, (4, 32))  # of two runs in a row
    numbers = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-3, -2)
    return _four_bits(_runs(scales), _runs(-minima), _runs(numbers))


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[..., :128].unflatten(-1, (2, 2, 32)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    lower = torch.stack([low & 15, low >> 4], -3).flatten(-3, -2)  # [..., half, run, 32]
    upper = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    numbers = ((lower | upper << 4).to(torch.int8) - 32).flatten(-3, -2)
    scales = blocks[..., 192:208].view(torch.int8).float() * _half(blocks, 208).float()[..., None]
    return _bytes(_runs(scales.unflatten(-1, (8, 2))).transpose(2, 3), _runs(numbers))


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], int, int, int]] = {
    "Q4_0": (_q4_0, RUN, 18, FOUR_BITS),
    "Q4_1": (_q4_1, RUN, 20, FOUR_BITS),
    "Q8_0": (_q8_0, RUN, 34, EIGHT_BITS),
    "Q4_K": (_q4_k, 8 * RUN, 144, WIDE_FOUR_BITS),
    "Q6_K": (_q6_k, 8 * RUN, 210, WIDE_EIGHT_BITS),
}
"""What arranges the blocks [P, K, 16, bytes] of a type, the numbers and the bytes of one, and what becomes of them."""
