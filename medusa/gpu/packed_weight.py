"""How a packed weight stands in a GPU's memory: eight numbers of 4 bits share a word, so one load feeds eight products.

Legend: O outputs, I inputs, C chunks of 256 inputs (128 of 8 bits), J runs of 32 inputs in a chunk, P panels of 16
outputs, K runs, B blocks of runs, F factors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.cpu.packed import FORMS, PANEL, SLICE, Packed

KNOWN = frozenset(FORMS) - {9}
"""Forms of ``Packed`` that the kernels know: all but MXFP4, which only experts have."""


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight [O, I] on a GPU. The tensors may be parts of wider ones, so their outputs have a stride.

    Attributes:
        numbers: int32 [C, O, 32]; bits ``bits * j`` and on of word i hold the integer of input ``32 j + i``.
        fifths: uint8 [C, O, 32], whose bit j is the fifth of 5; otherwise None.
        factors: [blocks, 1 or 2, O]; a block is the inputs that share them.
        codes: int32 [C, 2, J / 4, O], a byte for each run; or None.
        bits: Bits of an integer: 4, 5 or 8, of which those of 8 have a sign.
        outputs: O.
        inputs: I; the rest of the last chunk is 0.
        joint: Chunks that share factors.
        whole: The weight in whose memory it is, if that is another one.
    """

    numbers: Tensor
    fifths: Tensor | None
    factors: Tensor
    codes: Tensor | None
    bits: int
    outputs: int
    inputs: int
    joint: int
    whole: "PackedWeight | None" = None

    @classmethod
    def of(cls, packed: Packed, device: torch.device) -> "PackedWeight":
        """The same weight on this device; its form must be one of ``KNOWN``."""
        step = max(1, SLICE // (PANEL * packed.inputs))
        slices = [cls._of(packed, panels.to(device)) for panels in packed.parts.split(step)]
        return replace(cls.joined(slices), outputs=packed.outputs)

    @classmethod
    def _of(cls, packed: Packed, panels: Tensor) -> "PackedWeight":
        form, (factors, codes, numbers) = FORMS[packed.kind], packed.read(panels)
        if form.codes == 1:  # zero points, one for each block: factors become scales and offsets
            factors = torch.cat([factors, -factors * codes[:, :: packed.runs]], 2)
        runs = _runs(form.bits)
        if packed.runs < runs:
            factors = pad(factors, (0,) * 5 + (-factors.shape[1] % (runs // packed.runs),))
        whole, bytes_ = _chunks(numbers, runs), None  # [P, C, J, 16, 32]
        if form.codes == 2:
            bytes_ = (
                _joint(_chunks(codes, runs).unflatten(2, (-1, 4)) & 255, 3, 8)
                .permute(1, 3, 2, 0, 4)
                .flatten(3)
                .contiguous()
            )
        return cls(
            numbers=_outputs_first(_joint(whole & 255, 2, 8) if form.bits == 8 else _joint(whole & 15, 2, 4)),
            fifths=_outputs_first(_joint(whole >> 4, 2, 1).to(torch.uint8)) if form.bits == 5 else None,
            factors=factors.permute(1, 2, 0, 3).flatten(2).contiguous(),
            codes=bytes_,
            bits=form.bits,
            outputs=len(panels) * PANEL,
            inputs=packed.inputs,
            joint=max(1, packed.runs // runs),
        )

    @classmethod
    def joined(cls, weights: "Sequence[PackedWeight]") -> "PackedWeight":
        """One weight with the outputs of all, whose layouts must be the same (``layout``)."""
        first = weights[0]
        if len(weights) == 1:
            return first
        return replace(
            first,
            whole=None,
            numbers=torch.cat([one.numbers for one in weights], 1),
            fifths=None if first.fifths is None else torch.cat([one.fifths for one in weights], 1),  # type: ignore[misc]
            factors=torch.cat([one.factors for one in weights], 2),
            codes=None if first.codes is None else torch.cat([one.codes for one in weights], 3),  # type: ignore[misc]
            outputs=sum(one.outputs for one in weights),
        )

    def part(self, first: int, count: int) -> "PackedWeight":
        """``count`` outputs from ``first`` on, in its memory."""
        some = slice(first, first + count)
        return replace(
            self,
            whole=self,
            numbers=self.numbers[:, some],
            fifths=None if self.fifths is None else self.fifths[:, some],
            factors=self.factors[..., some],
            codes=None if self.codes is None else self.codes[..., some],
            outputs=count,
        )

    @property
    def layout(self) -> tuple[object, ...]:
        """What weights have in common that can be joined."""
        return self.bits, self.inputs, self.joint, self.factors.shape[:2], self.factors.dtype, self.codes is None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        held = (getattr(self, field.name) for field in fields(self))
        return sum(one.nbytes for one in held if isinstance(one, Tensor))

    @property
    def runs(self) -> int:
        """J, runs of a chunk."""
        return _runs(self.bits)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.numbers.device


def _runs(bits: int) -> int:
    """J for integers of these bits, so that a word holds one of each run."""
    return 4 if bits == 8 else 8


def _chunks(x: Tensor, runs: int) -> Tensor:
    """int32 [P, C, J, ...] of [P, K, a, b], padded with zeros."""
    whole: Tensor = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % runs)).unflatten(1, (-1, runs)).int()
    return whole


def _joint(integers: Tensor, dim: int, bits: int) -> Tensor:
    """Integers along a dimension as one word: each has ``bits`` bits, the first one the lowest."""
    first, *others = integers.unbind(dim)
    words = first.clone()
    for place, one in enumerate(others, start=1):
        words |= one << bits * place
    return words


def _outputs_first(words: Tensor) -> Tensor:
    """[C, 16 P, 32] of [P, C, 16, 32]."""
    return words.transpose(0, 1).flatten(1, 2).contiguous()
