"""Linear layers and embeddings whose weights stay packed on a GPU, as ``medusa.cpu.packed`` keeps them on a CPU.

Lossless: a product with few rows expands each weight in registers to the bfloat16 value that an expanded model has
(``medusa.gpu.packed_kernels``), and one with many rows expands a layer's outputs some at a time.

Legend: R rows, O outputs, I inputs, V tokens, D hidden size.
"""

import logging
import subprocess
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from medusa.cpu.gguf_types import Parts
from medusa.cpu.packed import DTYPE, FORMS, PANEL, RUN, Packed
from medusa.gpu import module
from medusa.gpu.packed_weight import KNOWN, PackedWeight

logger = logging.getLogger(__name__)

MOST_ROWS = 256
"""Rows of a product above which its weights are expanded in memory: in registers they are once for each 64 rows."""
EXPANDED = 1 << 25
"""About how many weights are expanded in memory at a time."""
OLDEST = (8, 0)
"""Compute capability from which on tensor cores multiply bfloat16."""
WAVES, MAX_SPLITS = 4, 32
"""Intended number of programs per multiprocessor, and most splits of a layer's inputs among programs."""
TOLERANCE = 0.01
"""Largest error of a trial product, relative to the largest number: outputs are rounded to 1/256."""


class PackedLinear(nn.Module):
    """A frozen linear layer with a packed weight.

    Args:
        packed: The weight.
        bias: [O] on the same device, or None.
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed, self.bias, self.dtype = packed, bias, DTYPE
        self.in_features, self.out_features = packed.inputs, packed.outputs

    @property
    def weight(self) -> Tensor:
        """The weight [O, I], expanded at each call; this takes time and memory."""
        return expand(self.packed)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` for bfloat16 x [..., I]; no gradient passes through."""
        return product(x, self.packed, self.bias)


class PackedEmbedding(nn.Module):
    """Frozen packed embeddings; only the rows that are read are expanded.

    Args:
        packed: The weight, with one output per token.
        scale: Factor on rows, in some families; None = 1.
    """

    def __init__(self, packed: PackedWeight, scale: Tensor | None = None) -> None:
        super().__init__()
        self.packed, self.scale = packed, scale

    @property
    def weight(self) -> Tensor:
        """The weight [V, D], expanded at each call; this takes time and memory."""
        return expand(self.packed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings, bfloat16 [..., D], of token ids [...]."""
        rows = expand(self.packed, tokens)
        return rows if self.scale is None else rows * self.scale


def expand(weight: PackedWeight, indices: Tensor | None = None, dtype: torch.dtype = DTYPE) -> Tensor:
    """Expand to [O, I] of a dtype, or only the rows of these outputs, int64 [...], to [..., I]."""
    kernels: Any = module("packed_kernels")
    flat = None if indices is None else indices.reshape(-1).to(weight.device)
    count = weight.outputs if flat is None else len(flat)
    out = torch.empty(count, weight.inputs, dtype=dtype, device=weight.device)
    if count:
        with torch.cuda.device_of(out):
            kernels.expand_kernel[(-(-count // 32), len(weight.numbers))](
                out if flat is None else flat, *_tensors(weight), out, count, weight.inputs,
                weight.numbers.stride(0) // RUN, **_layout(weight), INDEXED=flat is not None, BLOCK_O=32,
            )  # fmt: skip
    return out if indices is None else out.view(*indices.shape, weight.inputs)


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for bfloat16 x [..., I]."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = rows.new_empty(len(rows), weight.outputs)
    if len(rows) > MOST_ROWS:
        step = max(PANEL, EXPANDED // weight.inputs // PANEL * PANEL)
        for first in range(0, weight.outputs, step):
            part = weight.part(first, min(step, weight.outputs - first))
            some = slice(first, first + part.outputs)
            out[:, some] = linear(rows, expand(part), None if bias is None else bias[some])
    elif len(rows):
        _multiply(rows, weight, bias, out)
    return out.view(*x.shape[:-1], weight.outputs)


def _multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """The kernel's product, whose programs share a layer's inputs where its outputs do not fill the device."""
    kernels: Any = module("packed_kernels")
    rows, chunks, (processors, blackwell) = len(x), len(weight.numbers), _device(x.device)
    tile = tile_of(rows, blackwell)
    blocks = -(-weight.outputs // tile.outputs), -(-rows // tile.rows)
    each = -(-chunks // _splits(blocks[0] * blocks[1], chunks, processors))
    splits = -(-chunks // each)
    to = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32)
    with torch.cuda.device_of(x):
        kernels.product_kernel[(*blocks, splits)](
            x, *_tensors(weight), x if bias is None else bias, to, rows, weight.outputs, weight.inputs,
            weight.numbers.stride(0) // RUN, chunks, each, x.stride(0), **_layout(weight),
            BIAS=bias is not None, SPLIT=splits > 1, EVEN=weight.inputs == chunks * RUN * weight.runs,
            BLOCK_O=tile.outputs, BLOCK_R=tile.rows, UPCAST=x.device.type == "cpu", num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            grid = rows, -(-weight.outputs // 256)
            kernels.sum_kernel[grid](to, out, rows, weight.outputs, splits, BLOCK=256, num_warps=1)


def _splits(programs: int, chunks: int, processors: int) -> int:
    """Splits of the chunks, each of two at least, so that the programs fill the device."""
    return max(1, min(WAVES * processors // programs, chunks // 2, MAX_SPLITS))


@cache
def _device(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors of the device, and whether it is a B200 or of its kind."""
    if device.type != "cuda":
        return 4, False
    known = torch.cuda.get_device_properties(device)
    return known.multi_processor_count, known.major == 10


def _layout(weight: PackedWeight) -> dict[str, Any]:
    """Constants of the kernels."""
    blocks, factors, _ = weight.factors.shape
    return {
        "BITS": weight.bits, "FACTORS": factors, "CODES": weight.codes is not None,
        "BLOCKS": max(1, blocks // len(weight.numbers)), "JOINT": weight.joint,
    }  # fmt: skip


def _tensors(weight: PackedWeight) -> tuple[Tensor, ...]:
    """What the kernels read; numbers stand in for what they do not."""
    found = weight.numbers, weight.fifths, weight.factors, weight.codes
    return tuple(weight.numbers if one is None else one for one in found)


class Tile(NamedTuple):
    """The sizes of one program of a product: its outputs, rows, warps, and loads in flight."""

    outputs: int
    rows: int
    warps: int
    stages: int


def tile_of(rows: int, blackwell: bool = False) -> Tile:
    """The tile for this number of rows: with more rows, more outputs share a load of them.

    Args:
        rows: Rows of the product.
        blackwell: For a B200, where Triton 3.7 compiles 128 outputs to a kernel that computes nothing.
    """
    if rows <= 16:
        return Tile(64, 16, 4, 3)
    if rows <= 32:
        return Tile(64, 32, 4, 3)
    return Tile(64, 64, 4, 2) if blackwell else Tile(128, 64, 8, 2)


@cache
def objection(device: torch.device) -> str | None:
    """Why weights cannot stay packed on this GPU; None if they can. Small weights of each form are tried out once."""
    kernels: Any = module("packed_kernels")
    if kernels is None:
        return "there is no Triton"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return "its tensor cores do not multiply bfloat16"
    for form in sorted(KNOWN):
        packed = _sample(form)
        rows = (8, 24, 40)[form % 3]  # a number for each tile
        x = torch.linspace(-1, 1, rows * packed.inputs, device=device).to(DTYPE).view(rows, -1)
        try:
            weight, expected = PackedWeight.of(packed, device), packed.expand().to(device)
            same = torch.equal(expand(weight, dtype=torch.float32).to(DTYPE), expected)
            exact = x.double() @ expected.double().T
            error = (product(x, weight) - exact).abs().max() / exact.abs().max()
        except (kernels.triton.TritonError, RuntimeError, OSError, subprocess.SubprocessError) as failure:
            lines = [line for line in str(failure).splitlines() if line.strip()] or [type(failure).__name__]
            return f"a kernel for them fails: {lines[-1].strip()}"
        if not same or not error < TOLERANCE:
            return f"the kernels for them are wrong here (form {form})"
    return None


@cache
def pays(device: torch.device) -> bool:
    """Whether a row meets packed weights faster than expanded ones on this GPU; timed once, in turns."""
    chunks, outputs = 32, 16384
    weight = PackedWeight(
        numbers=torch.zeros(chunks, outputs, RUN, dtype=torch.int32, device=device),
        fifths=None,
        factors=torch.zeros(chunks, 2, outputs, dtype=torch.float16, device=device),
        codes=torch.zeros(chunks, 2, 2, outputs, dtype=torch.int32, device=device),
        bits=4, outputs=outputs, inputs=256 * chunks, joint=1,
    )  # fmt: skip
    expanded, x = expand(weight), torch.zeros(1, weight.inputs, dtype=DTYPE, device=device)

    def milliseconds(matrix: Tensor | PackedWeight) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            product(x, matrix) if isinstance(matrix, PackedWeight) else linear(x, matrix)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    with torch.cuda.device(device):
        rounds = [(milliseconds(weight), milliseconds(expanded)) for _ in range(6)]  # the first one compiles
    ours, theirs = (min(times) for times in zip(*rounds[1:], strict=True))
    logger.info("a row meets packed weights %.2f times as fast as expanded ones on %s", theirs / ours, device)
    return bool(ours < theirs)


def _sample(form: int) -> Packed:
    """A weight of this form with chance numbers: 40 outputs, and inputs that do not fill a chunk where they may."""
    known, chance = FORMS[form], torch.Generator().manual_seed(form)
    whole = known.codes == 2  # eight runs share factors
    runs, panels, blocks = 16 if whole else 18, 3, 2 if whole else 9 if known.factor == torch.float32 else 18
    low, high = (-128, 128) if known.bits == 8 else (0, 1 << known.bits)
    integer = torch.int8 if known.bits == 8 else torch.uint8
    numbers = torch.randint(low, high, (panels, PANEL, runs, RUN), generator=chance).to(integer)
    factors = (torch.rand(panels, PANEL, blocks, known.factors, generator=chance) - 0.5).half().float()
    codes = torch.randint(1, 16, (panels, PANEL, runs, known.codes), generator=chance)
    if known.codes == 1:  # one of each block
        codes = codes[:, :, :: runs // blocks].repeat_interleave(runs // blocks, 2)
    return Packed._of(Parts(form, factors, numbers, codes if known.codes else None), 40, runs * RUN)
