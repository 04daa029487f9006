"""Linear layers whose weights stay packed as in their files: a quarter or half of the bytes of bfloat16.

This is lossless: drafted text is that of plain decoding, bit by bit. With a matrix unit (AMX) each weight is expanded
to the bfloat16 value that an expanded model has, and sums are equal bit by bit (kernels/tiles.h). Other processors do
not round weights at all: their sums are those of the file's integers and scales in float32 (kernels/packed.h). Where
integers are multiplied faster than floats (AVX2, VNNI) rows are integers of 16 bits, which hold what matters of
bfloat16 (kernels/whole.h). A row's result does not depend on other rows in any case.

Legend: O outputs, I inputs, P panels of 16 outputs, K runs of 32 inputs, B blocks of runs, F factors, C codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from medusa.cpu.gguf_types import KINDS, Parts, mx_parts
from medusa.cpu.native import LinearKernel, LinearStruct, available, has_tiles, kernels

PANEL, RUN = 16, 32
"""Outputs of a panel, and inputs that share a scale; as in kernels/weights.h."""
DTYPE = torch.bfloat16
"""Dtype of expanded weights."""
SLICE = 1 << 24
"""About how many weights are expanded at a time."""
ROUNDED = 1 << 20
"""About how many weights are rounded at a time, which takes a multiple of their memory."""


class Form(NamedTuple):
    """The layout of a panel, as ``Form`` of kernels/weights.h."""

    factor: torch.dtype
    factors: int
    code: torch.dtype
    codes: int
    bits: int
    sign: bool = False


FORMS = {
    1: Form(torch.float16, 2, torch.uint8, 0, 4),
    2: Form(torch.float16, 2, torch.uint8, 0, 5),
    3: Form(torch.float16, 1, torch.int8, 0, 8, True),
    4: Form(torch.float16, 2, torch.uint8, 2, 4),
    5: Form(torch.float16, 2, torch.uint8, 2, 5),
    6: Form(torch.float16, 1, torch.int8, 2, 8, True),
    7: Form(torch.float32, 1, torch.uint8, 1, 4),
    8: Form(torch.float32, 1, torch.int8, 0, 8, True),
    9: Form(torch.float8_e8m0fnu, 1, torch.uint8, 0, 4, True),
}
"""Layouts by ``Packing`` of kernels/weights.h."""
FOR_TILES, IN_LANES, ROUNDED_ROWS = 0, 16, 32
"""Added to a packing: the order of its integers for a matrix unit, or for vectors of outputs; in the last case rows are
rounded to 8 bits too (kernels/whole.h)."""
E2M1_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
"""Integers by the four bits of layout 9."""
BYTE = [0, 2, 1, 3]
"""Place of each of four inputs in this second order."""


@dataclass(frozen=True)
class Packed:
    """A packed weight [O, I].

    Attributes:
        parts: uint8 [P, bytes] panels in the layout of kernels/weights.h.
        packing: Their layout: a key of ``FORMS`` plus ``FOR_TILES``, ``IN_LANES`` or ``ROUNDED_ROWS``.
        outputs: O, number of outputs; the rest of the last panel is 0.
        inputs: I, number of inputs; the rest of the last run is 0.
        runs: Runs of a block, a power of two; they share its factors.
    """

    parts: Tensor
    packing: int
    outputs: int
    inputs: int
    runs: int

    @classmethod
    def of(cls, blocks: Tensor, kind: str) -> "Packed":
        """Pack a weight of a GGUF file.

        Args:
            blocks: uint8 [O, bytes] rows of the file.
            kind: Name of the type in the file, one of ``KINDS``.
        """
        read, numbers, size = KINDS[kind]
        blocks = blocks.view(len(blocks), -1, size)
        return cls._of(read(_panels(blocks)), len(blocks), blocks.shape[1] * numbers)

    @classmethod
    def of_groups(cls, numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> "Packed | None":
        """Pack the weight (numbers - zeros) * scales; None if no packing represents it exactly.

        Args:
            numbers: uint8 [O, I] integers.
            scales: [O, G] scales of groups of inputs of equal size, in order.
            zeros: uint8 [O, G] zero points.
            bits: Bits of an integer, 4 or 8.
        """
        (outputs, inputs), groups, scales = numbers.shape, scales.shape[1], scales.float()
        if inputs % (RUN * groups):
            return None
        factors = _panels(scales[..., None])
        if bits == 4:
            # Products of 16 bits and 4 are exact in float32, and so is a sum of two that is one.
            if not any(torch.equal(scales.to(dtype).float(), scales) for dtype in (torch.float16, torch.bfloat16)):
                return None
            codes = _panels(zeros.repeat_interleave(inputs // RUN // groups, 1)[..., None])
            return cls._of(Parts(7, factors, _panels(numbers.unflatten(1, (-1, RUN))), codes), outputs, inputs)
        signed = numbers.view(outputs, groups, -1).short() - zeros[..., None].short()
        if signed.amin() < -128 or signed.amax() > 127:
            return None
        return cls._of(Parts(8, factors, _panels(signed.to(torch.int8).view(outputs, -1, RUN))), outputs, inputs)

    @classmethod
    def of_mx(cls, numbers: Tensor, exponents: Tensor) -> "Packed | None":
        """Pack a weight of MXFP4; None if no packing represents it exactly (numbers below 2^-126, or NaN).

        Args:
            numbers: uint8 [O, K, 32] numbers of 4 bits (E2M1).
            exponents: uint8 [O, K] scales of the runs (E8M0).
        """
        small = exponents < 2
        if (exponents == 255).any() or (small.any() and (numbers[small] & 7).any()):
            return None
        parts = mx_parts(_panels(exponents[..., None]), _panels(numbers))
        return cls._of(parts, len(numbers), numbers.shape[1] * RUN)

    @classmethod
    def _of(cls, parts: Parts, outputs: int, inputs: int) -> "Packed":
        form, groups = FORMS[parts.packing], parts.factors.shape[2]
        shared = inputs // RUN // groups
        runs = shared & -shared  # the largest power of two that divides it
        factors = parts.factors.to(form.factor).repeat_interleave(shared // runs, 2)
        columns = [factors.permute(0, 2, 3, 1)]
        if parts.codes is not None:
            columns.append(parts.codes.to(form.code).permute(0, 2, 3, 1))
        numbers = parts.numbers
        if form.bits < 8:  # four outputs share a word, whose lower byte stands first
            halves = (numbers[:, ::2] & 15 | numbers[:, 1::2] << 4).unflatten(1, (-1, 2))
            numbers = halves.movedim(2, -1).flatten(-2)
        in_runs = [numbers.transpose(1, 2).contiguous().view(torch.uint8).flatten(2)]
        if form.bits == 5:
            fifth = (parts.numbers.long() >> 4 << torch.arange(RUN)).sum(-1).to(torch.uint32)
            in_runs.append(fifth.transpose(1, 2).contiguous().view(torch.uint8))
        columns.append(torch.cat(in_runs, -1))
        blocks = [column.contiguous().view(torch.uint8).view(len(column), factors.shape[2], -1) for column in columns]
        sizes = [block.shape[-1] for block in blocks]
        joined = torch.empty(*blocks[0].shape[:2], sum(sizes), dtype=torch.uint8)
        for to, block in zip(joined.split(sizes, -1), blocks, strict=True):
            to.copy_(block)  # torch.cat takes several times as long where blocks are small
        return cls(joined.flatten(1), parts.packing, outputs, inputs, runs)

    @classmethod
    def rounded(cls, weight: Tensor) -> "Packed":
        """LOSSY: round a weight [O, I] to 8 bits, each run by its largest number; inputs are padded to whole runs."""
        parts = []
        for some in weight.split(max(1, ROUNDED // weight.shape[1] // PANEL) * PANEL):
            runs = pad(some.float(), (0, -weight.shape[1] % RUN)).unflatten(1, (-1, RUN))
            factors = (runs.abs().amax(-1, keepdim=True) / 127).half()
            scales = factors.float()
            numbers = (runs / scales.where(scales > 0, 1)).round().clamp(-127, 127)
            of_some = Parts(3, _panels(factors), _panels(numbers.to(torch.int8)))
            parts.append(cls._of(of_some, len(runs), runs.shape[1] * RUN))
        return replace(cls.joined(parts), inputs=weight.shape[1])

    @classmethod
    def joined(cls, weights: "Sequence[Packed]") -> "Packed":
        """One weight with the outputs of all; each but the last must end with a panel, and layouts must be the same."""
        outputs = sum(one.outputs for one in weights)
        return replace(weights[0], parts=torch.cat([one.parts for one in weights]), outputs=outputs)

    @property
    def kind(self) -> int:
        """The key of ``FORMS``."""
        return (self.packing - 1) % IN_LANES + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.parts.nbytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.parts.device

    @property
    def int8(self) -> bool:
        """LOSSY: whether rows that meet it are rounded to 8 bits."""
        return self.packing > ROUNDED_ROWS

    def ordered(self, order: int) -> "Packed":
        """The same weight in another order; itself if that is its own."""
        if self.packing == self.kind + order:
            return self
        parts = self.parts
        if (self.packing > IN_LANES) != (order > 0):
            parts = parts.clone()
            kernels().medusa_reorder(torch.get_num_threads(), self.struct(), parts.data_ptr())
        return replace(self, parts=parts, packing=self.kind + order)

    def for_here(self, int8: bool = False) -> "Packed":
        """The same weight in the order that this processor reads, rounding rows or not."""
        if not available():
            return self
        return self.ordered(ROUNDED_ROWS if int8 else FOR_TILES if has_tiles() else IN_LANES)

    def expand(self) -> Tensor:
        """Expand to bfloat16 [O, I], the weight of a model that is expanded when it is loaded."""
        if self.inputs % RUN == 0 and available():
            found = torch.empty(self.outputs, self.inputs, dtype=DTYPE)
            kernels().medusa_expand(torch.get_num_threads(), self.struct(), found.data_ptr())
            return found
        whole = torch.empty(len(self.parts) * PANEL, self.inputs, dtype=DTYPE)
        some = max(1, SLICE // (PANEL * self.inputs))
        for part, to in zip(self.parts.split(some), whole.split(some * PANEL), strict=True):
            to.copy_(self._expand(part))
        return whole[: self.outputs]

    def rows(self, indices: Tensor) -> Tensor:
        """Expand the rows of these outputs, int64 [...], to bfloat16 [..., I]."""
        found = []
        for some in indices.flatten().split(SLICE // (PANEL * self.inputs) + 1):
            panels = self._expand(self.parts[some // PANEL]).unflatten(0, (-1, PANEL))
            found.append(panels[torch.arange(len(some)), some % PANEL])
        return torch.cat(found).view(*indices.shape, self.inputs)

    def split(self, counts: Sequence[int]) -> "list[Packed]":
        """Split its outputs into weights with these numbers of outputs; each but the last must end with a panel."""
        parts = self.parts.split([-(-count // PANEL) for count in counts])
        return [replace(self, parts=part, outputs=count) for part, count in zip(parts, counts, strict=True)]

    def read(self, panels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Factors [P, B, F, 16], codes [P, K, C, 16] and integers [P, K, 16, 32] of panels, on any device."""
        form, runs, found, at = FORMS[self.kind], -(-self.inputs // RUN), [], 0
        blocks = panels.view(len(panels), runs // self.runs, -1)
        for kind, count, rows in ((form.factor, form.factors, 1), (form.code, form.codes, self.runs)):
            size = rows * count * PANEL * kind.itemsize
            column = blocks[..., at : at + size].contiguous().view(kind)
            found.append(column.view(len(panels), blocks.shape[1] * rows, count, PANEL))
            at += size
        rest = blocks[..., at:].reshape(len(panels), runs, -1)
        return found[0], found[1], (_in_lanes if self.packing > IN_LANES else _for_tiles)(rest, form.bits)

    def _expand(self, panels: Tensor) -> Tensor:
        """Expand panels to bfloat16 [16 P, I]."""
        form, (factors, codes, whole) = FORMS[self.kind], self.read(panels)
        factors, codes = factors.float().repeat_interleave(self.runs, 1), codes.float()
        values = (factors[:, :, 0], factors[:, :, -1])  # [P, K, 16] each
        if form.codes == 1:
            values = factors[:, :, 0], -(factors[:, :, 0] * codes[:, :, 0])
        elif form.codes == 2:
            values = factors[:, :, 0] * codes[:, :, 0], (1 if form.sign else -1) * (factors[:, :, -1] * codes[:, :, 1])
        if form.sign:
            whole = E2M1_TWICE[whole.int()] if form.bits == 4 else whole
            halves = whole.unflatten(-1, (2, RUN // 2))
            numbers = (halves.float() * torch.stack(values, -1)[..., None]).flatten(3)
        else:
            numbers = whole.float() * values[0][..., None] + values[1][..., None]
        weight: Tensor = numbers.to(DTYPE).transpose(1, 2).reshape(len(panels) * PANEL, -1)
        return weight[:, : self.inputs]

    def struct(self, bias: Tensor | None = None) -> LinearStruct:
        """The struct for the kernels; the tensors must not move."""
        return LinearStruct.of(self.parts, bias, self.inputs, self.outputs, self.packing, self.runs)


def struct_of(weight: Tensor | Packed, bias: Tensor | None = None) -> LinearStruct:
    """The struct of a linear layer for the kernels; the tensors must not move."""
    return weight.struct(bias) if isinstance(weight, Packed) else LinearStruct.of(weight, bias)


class PackedLinear(nn.Module):
    """A frozen linear layer with a packed weight, computed by the kernel.

    Args:
        packed: The weight; its tensor must not move.
        bias: [O], or None.
        dtype: Dtype of rows, of outputs and of the bias; others than bfloat16 only if rows are rounded.
    """

    def __init__(self, packed: Packed, bias: Tensor | None = None, dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        self.packed = packed = packed.for_here(packed.int8)
        self.bias, self.in_features, self.out_features = bias, packed.inputs, packed.outputs
        self.kernel = LinearKernel(packed.struct(bias), dtype, [packed.parts, bias])

    @property
    def weight(self) -> Tensor:
        """The weight [O, I], expanded at each call; this takes time and memory."""
        return self.packed.expand()

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for x [..., I] of the kernel's dtype; no gradient passes through."""
        return self.kernel(x)


class PackedEmbedding(nn.Module):
    """Frozen packed embeddings; only the rows that are read are expanded.

    Args:
        packed: The weight, with one output per token.
        scale: Factor on rows, in some families; None = 1.
    """

    def __init__(self, packed: Packed, scale: Tensor | None = None) -> None:
        super().__init__()
        self.packed, self.scale = packed.for_here(packed.int8), scale

    @property
    def weight(self) -> Tensor:
        """The weight [V, D], expanded at each call; this takes time and memory."""
        return self.packed.expand()

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings, bfloat16 [..., D], of token ids [...]."""
        rows = self.packed.rows(tokens)
        return rows if self.scale is None else rows * self.scale


def _for_tiles(runs: Tensor, bits: int) -> Tensor:
    """Integers [P, K, 16, 32] of runs, uint8 [P, K, bytes]: four outputs share a word."""
    whole: Tensor
    if bits == 8:
        whole = runs.view(torch.int8).unflatten(-1, (PANEL, RUN))
        return whole
    words = runs[..., : PANEL * RUN // 2].contiguous().view(torch.int16).unflatten(-1, (PANEL // 4, 1, RUN))
    whole = (words >> 4 * torch.arange(4, device=runs.device)[:, None] & 15).flatten(2, 3)
    if bits == 5:
        fifth = runs[..., PANEL * RUN // 2 :].contiguous().view(torch.int32)[..., None]
        whole = whole | (fifth >> torch.arange(RUN, device=runs.device) & 1) << 4
    return whole


def _in_lanes(runs: Tensor, bits: int) -> Tensor:
    """The same of the other order: four inputs of an output stand side by side, then those of the next output."""
    if bits == 8:
        fours = runs.view(torch.int8).unflatten(-1, (RUN // 4, PANEL, 4))
    else:
        pairs = runs[..., : PANEL * RUN // 2].unflatten(-1, (RUN // 8, PANEL, 4))
        fours = torch.cat([pairs & 15, pairs >> 4], 2)
    if bits == 5:
        fifth = runs[..., PANEL * RUN // 2 :].unflatten(-1, (1, PANEL, 4))
        fours = fours | (fifth >> torch.arange(RUN // 4, dtype=torch.uint8, device=runs.device)[:, None, None] & 1) << 4
    integers: Tensor = fours[..., BYTE].transpose(2, 3).flatten(3)
    return integers


def _panels(x: Tensor) -> Tensor:
    """Reshape [O, ...] to panels [P, 16, ...], padded with zeros."""
    whole: Tensor = pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % PANEL))
    return whole.view(-1, PANEL, *x.shape[1:])


def held_bits(kind: str) -> float:
    """Bits of a packed weight of this type, including its share of scales."""
    _, numbers, size = KINDS[kind]
    packed = Packed.of(torch.zeros(PANEL, size, dtype=torch.uint8), kind)
    return 8 * packed.parts.numel() / (PANEL * numbers)
