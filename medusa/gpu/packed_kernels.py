"""Triton kernels for packed weights (``medusa.gpu.packed``): products with rows, and the weights themselves.

A weight is expanded in registers, to the bfloat16 value that an expanded model has, on its way to the tensor cores, so
memory is read for its bits alone. Weights are the first operand of a product, since that one comes from registers, and
rows, which are few, are the second.

Legend: R rows, O outputs, I inputs, C chunks of inputs, J runs of 32 inputs in a chunk, T outputs in memory.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(0x4B000000)
"""The bits of 2^23 in float32: with an integer below 2^23 in its lower bits, the sum of both."""


@triton.jit
def _integers(words, fifths, run: tl.constexpr, BITS: tl.constexpr):
    """The integers of a run as float32 [O, 32], times a power of 2; and the inverse of this power."""
    if BITS == 8:
        return ((words << (24 - 8 * run)) >> 24).to(tl.float32), 1.0  # with their sign
    if BITS == 5:
        integer = (words >> 4 * run) & 15 | ((fifths.to(tl.int32) >> run) & 1) << 4
        return integer.to(tl.float32), 1.0
    # Converting an integer costs several times as much as this, and a shift is saved for most of them.
    low: tl.constexpr = run % 5
    there = words if run < 5 else words >> 20
    sum_ = ((there & (15 << 4 * low)) | MAGIC).to(tl.float32, bitcast=True)
    return sum_ - 8388608.0, 1.0 / (1 << 4 * low)


@triton.jit
def _code(words, run: tl.constexpr, BITS: tl.constexpr):
    """The codes of a run as float32 [O]: a byte of each word, with a sign where integers have one."""
    if BITS == 8:
        return ((words << (24 - 8 * run)) >> 24).to(tl.float32)
    return ((words >> 8 * (run % 4)) & 255).to(tl.float32)


@triton.jit
def _weights(
    words, fifths, first, last, codes, more,
    run: tl.constexpr, BITS: tl.constexpr, FACTORS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Weights of a run, float32 [O, 32]: integers times a scale, plus an offset; as ``Packed`` expands them."""
    integer, unit = _integers(words, fifths, run, BITS)
    if CODES and BITS == 8:  # each half of a run has a scale
        half = tl.arange(0, 32)[None] < 16
        scales = first * _code(codes, run, BITS), first * _code(more, run, BITS)
        return integer * tl.where(half, scales[0][:, None], scales[1][:, None])
    if CODES:
        return integer * (first * _code(codes, run, BITS) * unit)[:, None] - (last * _code(more, run, BITS))[:, None]
    if FACTORS == 2:
        return integer * (first * unit)[:, None] + last[:, None]
    return integer * (first * unit)[:, None]


@triton.jit
def _numbers(numbers, fifths, chunk, output, inside, total, BITS: tl.constexpr):
    """Words of a chunk [O, 32], and bytes of fifth bits."""
    place = (chunk * total + output)[:, None] * 32 + tl.arange(0, 32)[None]
    words = tl.load(numbers + place, mask=inside[:, None], other=0)
    return words, (tl.load(fifths + place, mask=inside[:, None], other=0) if BITS == 5 else words)


@triton.jit
def _factors(factors, block, output, inside, total, FACTORS: tl.constexpr):
    """The first and the last factor [O] of a block."""
    place = factors + block * FACTORS * total + output
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return first, (tl.load(place + total, mask=inside, other=0.0).to(tl.float32) if FACTORS == 2 else first)


@triton.jit
def _codes(codes, chunk, run: tl.constexpr, output, inside, total, RUNS: tl.constexpr):
    """Words [O] with the codes of four runs, the first and the second of each."""
    place = codes + (chunk * (RUNS // 2) + run // 4) * total + output
    return tl.load(place, mask=inside, other=0), tl.load(place + RUNS // 4 * total, mask=inside, other=0)


@triton.jit(do_not_specialize=["rows", "chunks", "each"])
def product_kernel(
    x,  # [R, I] by stride
    numbers,  # int32 [C, T, 32]
    fifths,  # uint8 [C, T, 32]; read only with BITS = 5
    factors,  # [blocks, FACTORS, T]
    codes,  # int32 [C, 2, J / 4, T]; read only with CODES
    bias,  # [O]; read only with BIAS
    out,  # [R, O], or float32 [splits, R, O] with SPLIT
    rows,
    outputs,
    inputs,
    total,  # T
    chunks,  # C
    each,  # chunks of a split
    x_stride,
    BITS: tl.constexpr,  # of integers: 4 or 5 without a sign, or 8 with one
    FACTORS: tl.constexpr,  # 1, or 2: the second one is an offset, or a factor on one
    CODES: tl.constexpr,  # whether runs have codes, which are multiplied with factors
    BLOCKS: tl.constexpr,  # blocks with factors of their own in a chunk
    JOINT: tl.constexpr,  # chunks that share factors
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # inputs fill the last chunk
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UPCAST: tl.constexpr,  # Triton's interpreter neither rounds to bfloat16 nor multiplies it rightly
):
    """``x @ weight.T + bias`` of some outputs and rows over the chunks of a split."""
    RUNS: tl.constexpr = 4 if BITS == 8 else 8
    output = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    inside, there, column = output < outputs, (row < rows)[None], tl.arange(0, 32)[:, None]
    x += row[None] * x_stride + column
    sums = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    for chunk in range(split * each, min((split + 1) * each, chunks)):
        words, upper = _numbers(numbers, fifths, chunk, output, inside, total, BITS)
        some, more = output, output
        for run in tl.static_range(RUNS):
            if run % (RUNS // BLOCKS) == 0:
                block = chunk // JOINT * BLOCKS + run * BLOCKS // RUNS
                first, last = _factors(factors, block, output, inside, total, FACTORS)
            if CODES and run % 4 == 0:
                some, more = _codes(codes, chunk, run, output, inside, total, RUNS)
            weight = _weights(words, upper, first, last, some, more, run, BITS, FACTORS, CODES)
            place = (chunk * RUNS + run) * 32
            x_IR = tl.load(x + place, mask=there if EVEN else there & (place + column < inputs), other=0.0)
            sums = tl.dot(weight, x_IR.to(tl.float32), sums) if UPCAST else tl.dot(weight.to(x_IR.dtype), x_IR, sums)
    if BIAS:
        sums += tl.load(bias + output, mask=inside & (split == 0), other=0.0).to(tl.float32)[:, None]
    place = row[None] * outputs + output[:, None]
    if SPLIT:
        place += split * rows * outputs
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside[:, None] & there)


@triton.jit(do_not_specialize=["rows", "splits"])
def sum_kernel(
    partial,  # float32 [splits, R, O]
    out,  # [R, O]
    rows,
    outputs,
    splits,
    BLOCK: tl.constexpr,
):
    """The sums over splits, in order."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    sums = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        sums += tl.load(partial + (split * rows + row) * outputs + column, mask=inside, other=0.0)
    tl.store(out + row * outputs + column, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["outputs"])
def expand_kernel(
    indices,  # int64 [O]; read only with INDEXED
    numbers,  # as in product_kernel, and what follows
    fifths,
    factors,
    codes,
    out,  # [O, I]
    outputs,
    inputs,
    total,
    BITS: tl.constexpr,
    FACTORS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCKS: tl.constexpr,
    JOINT: tl.constexpr,
    INDEXED: tl.constexpr,  # the weights of these outputs instead of the first ones
    BLOCK_O: tl.constexpr,
):
    """The weights of some outputs in one chunk."""
    RUNS: tl.constexpr = 4 if BITS == 8 else 8
    place = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    chunk = tl.program_id(1)
    inside, column = place < outputs, tl.arange(0, 32)[None]
    output = tl.load(indices + place, mask=inside, other=0).to(tl.int32) if INDEXED else place
    words, upper = _numbers(numbers, fifths, chunk, output, inside, total, BITS)
    some, more = output, output
    for run in tl.static_range(RUNS):
        if run % (RUNS // BLOCKS) == 0:
            block = chunk // JOINT * BLOCKS + run * BLOCKS // RUNS
            first, last = _factors(factors, block, output, inside, total, FACTORS)
        if CODES and run % 4 == 0:
            some, more = _codes(codes, chunk, run, output, inside, total, RUNS)
        weight = _weights(words, upper, first, last, some, more, run, BITS, FACTORS, CODES)
        at = (chunk * RUNS + run) * 32 + column
        to = out + place[:, None].to(tl.int64) * inputs + at
        tl.store(to, weight.to(out.dtype.element_ty), mask=inside[:, None] & (at < inputs))
