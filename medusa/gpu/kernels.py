"""Triton kernels for what stands between the matrix products of a decoder layer; each replaces several of torch's.

A further one moves accepted keys and values of all layers. They round where transformers' layers round. Legend: R rows,
D hidden size, I inner size, H query heads, G key heads, d head size, S sequences, A nodes of a path.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x,  # [R, WIDTH], in and out: the residual stream
    y,  # [R, WIDTH] what is added first; read only with ADD
    weight,  # [WIDTH]
    out,  # [R, WIDTH] by stride
    out_stride,
    epsilon,
    factor,  # of y
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """``x += factor * y``, then ``out = weight * x / rms(x)``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype = x.dtype.element_ty
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(y + row * WIDTH + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + factor * added.to(tl.float32)).to(dtype)
        tl.store(x + row * WIDTH + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    normed = (wide * scale).to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, scaled.to(dtype), mask=inside)


@triton.jit
def turn_kernel(
    joined,  # [R, H + 2 G, DIM] queries, keys and values
    positions,  # [R] int64
    places,  # [R] int64, where the rows' keys and values are stored
    cosines,  # [positions, ROTATED]
    sines,
    norms,  # [2, DIM] weights of the norms of each query head and of each key head; read only with NORM
    query,  # out [R, H, DIM]
    keys,  # out [places, G, DIM]
    values,  # out [places, G, DIM]
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and rotate one head of a row, and store it where attention reads it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    joined += (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    dtype = query.dtype.element_ty
    value = tl.load(joined + column, mask=inside, other=0.0)
    place = tl.load(places + row)
    if head >= HEADS + KV_HEADS:
        tl.store(values + (place * KV_HEADS + head - HEADS - KV_HEADS) * DIM + column, value, mask=inside)
    else:
        half: tl.constexpr = ROTATED // 2
        other = tl.where(column < half, column + half, column - half)
        turned = column < ROTATED
        partner = tl.load(joined + other, mask=turned, other=0.0)
        if NORM:
            norms += (head >= HEADS).to(tl.int32) * DIM
            wide = value.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / DIM + epsilon)
            value = (wide * scale).to(dtype).to(tl.float32) * tl.load(norms + column, mask=inside, other=0.0)
            partner = (partner.to(tl.float32) * scale).to(dtype).to(tl.float32)
            partner = partner * tl.load(norms + other, mask=turned, other=0.0)
            value, partner = value.to(dtype), partner.to(dtype)
        angle = tl.load(positions + row) * ROTATED + column
        cosine = tl.load(cosines + angle, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=turned, other=0.0).to(tl.float32)
        near = (value.to(tl.float32) * cosine).to(dtype).to(tl.float32)
        far = (partner.to(tl.float32) * sine).to(dtype).to(tl.float32)
        result = tl.where(column < half, near - far, near + far).to(dtype)
        if head < HEADS:
            tl.store(query + (row * HEADS + head) * DIM + column, result, mask=inside)
        else:
            tl.store(keys + (place * KV_HEADS + head - HEADS) * DIM + column, result, mask=inside)


@triton.jit
def gate_kernel(
    joined,  # [R, 2 WIDTH] gates, then values
    out,  # [R, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out = silu(gate) * value``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(joined + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(joined + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    open_ = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (open_ * value).to(dtype), mask=inside)


@triton.jit
def move_kernel(
    addresses,  # [buffers] int64
    like,  # any of the buffers, for its type
    sources,  # [S, A] int64 rows
    targets,  # [S, A] int64 rows, each at most its source
    moves,  # A
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move the rows of one sequence in one buffer, in order, so that none is overwritten before it is read."""
    buffer = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(like.dtype.element_ty))
    first = tl.program_id(1).to(tl.int64) * moves
    column = tl.arange(0, BLOCK)
    for move in range(moves):
        source, target = tl.load(sources + first + move), tl.load(targets + first + move)
        inside = (column < WIDTH) & (source != target)
        row = tl.load(buffer + source * WIDTH + column, mask=inside, other=0.0)
        tl.store(buffer + target * WIDTH + column, row, mask=inside)
