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
FOUR_BITS, EIGHT_BITS = 1, 2
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
        arrange, size, packing = KINDS[kind]
        outputs = len(blocks)
        panels = pad(blocks, (0, 0, 0, -outputs % PANEL)).view(-1, PANEL, blocks.shape[1] // size, size)
        return cls(arrange(panels.transpose(1, 2)), packing, outputs)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """[O, I] of that dtype, as a model whose weights are expanded when it is loaded has it."""
        panels, runs, _ = self.parts.shape
        scales = self._halves(0)
        if self.packing == FOUR_BITS:
            nibbles = self.parts[..., 4 * PANEL :].unflatten(-1, (PANEL, 8, 2))
            both = torch.stack([nibbles & 15, nibbles >> 4], -1)  # [P, K, 16, word, byte, nibble]
            numbers = both.movedim(3, -1).flatten(3).float() * scales + self._halves(1)
        else:
            numbers = self.parts[..., 2 * PANEL :].view(torch.int8).unflatten(-1, (PANEL, RUN)).float() * scales
        return numbers.to(dtype).transpose(1, 2).reshape(panels * PANEL, runs * RUN)[: self.outputs]

    def _halves(self, place: int) -> Tensor:
        """float32 [P, K, 16, 1] of the scales, or of the offsets behind them."""
        own = self.parts[..., place * 2 * PANEL : (place + 1) * 2 * PANEL]
        return own.contiguous().view(torch.float16).float()[..., None]


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
        self.kernel = LinearKernel(self.struct(), dtype, [packed.parts, bias])

    @property
    def weight(self) -> Tensor:
        """[O, I] expanded; where no tensor holds it already, that takes its time and memory."""
        return self.packed.expand(self.dtype) if self._weight is None else self._weight

    def struct(self) -> LinearStruct:
        """What kernels know of it."""
        packed = self.packed
        return LinearStruct.of(packed.parts, self.bias, None, packed.inputs, packed.outputs, packed.packing)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., I] of the layer's dtype; no gradient passes through."""
        return self.kernel(x)


def _four_bits(scales: Tensor, offsets: Tensor, blocks: Tensor) -> Tensor:
    """Of numbers i and i + 16 in a byte: words of numbers i, i + 8, i + 16 and i + 24."""
    first, second = (blocks & 15).unflatten(-1, (2, 8)), (blocks >> 4).unflatten(-1, (2, 8))
    words = torch.stack([numbers[..., 0, :] | numbers[..., 1, :] << 4 for numbers in (first, second)], -1)
    return torch.cat([scales.flatten(2), offsets.flatten(2), words.flatten(2)], -1)


def _q4_0(blocks: Tensor) -> Tensor:
    scales = blocks[..., :2].contiguous().view(torch.float16)
    return _four_bits(scales.view(torch.uint8), (scales * -8).view(torch.uint8), blocks[..., 2:])


def _q4_1(blocks: Tensor) -> Tensor:
    return _four_bits(blocks[..., :2], blocks[..., 2:4], blocks[..., 4:])


def _q8_0(blocks: Tensor) -> Tensor:
    return torch.cat([blocks[..., :2].flatten(2), blocks[..., 2:].flatten(2)], -1)


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "Q4_0": (_q4_0, 18, FOUR_BITS),
    "Q4_1": (_q4_1, 20, FOUR_BITS),
    "Q8_0": (_q8_0, 34, EIGHT_BITS),
}
"""What arranges the blocks [P, K, 16, bytes] of a type, the bytes of one, and what becomes of them."""
