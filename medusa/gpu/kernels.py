"""Triton kernels for what stands between the matrix products of a decoder layer; each replaces several of torch's.

A further one moves accepted keys and values of all layers. They round where transformers' layers round. Legend: R rows,
D hidden size, I inner size, H query heads, G key heads, d head size, S sequences, A nodes of a path.
"""

import triton
import triton.language as tl


@triton.jit
def _factor(row, count, epsilon):
    """What gives a row of ``count`` numbers, zeros behind them, the root mean square 1."""
    wide = row.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / count + epsilon)


@triton.jit
def _scaled(row, factor, weight, offset, ONCE: tl.constexpr):
    """A row times this factor and the weights of a norm; rounded between them only without ONCE."""
    dtype = row.dtype
    unit = row.to(tl.float32) * factor
    unit = unit if ONCE else unit.to(dtype).to(tl.float32)
    return (unit * (weight.to(tl.float32) + offset)).to(dtype)


@triton.jit
def add_norm_kernel(
    x,  # [R, WIDTH], in and out: the residual stream
    y,  # [R, WIDTH] what is added first; read only with ADD
    after,  # [WIDTH] weights of a norm of y; read only with AFTER
    before,  # [WIDTH] weights of a norm of x; read only with BEFORE
    out,  # [R, WIDTH] by stride
    out_stride,
    epsilon,
    offset,  # of weights
    factor,  # of y
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    AFTER: tl.constexpr,
    BEFORE: tl.constexpr,
    ONCE: tl.constexpr,
):
    """``x += factor * norm(y)``, then ``out = norm(x)``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype = x.dtype.element_ty
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(y + row * WIDTH + column, mask=inside, other=0.0)
        if AFTER:
            weight = tl.load(after + column, mask=inside, other=0.0)
            added = _scaled(added, _factor(added, WIDTH, epsilon), weight, offset, ONCE)
        value = (value.to(tl.float32) + factor * added.to(tl.float32)).to(dtype)
        tl.store(x + row * WIDTH + column, value, mask=inside)
    if BEFORE:
        weight = tl.load(before + column, mask=inside, other=0.0)
        value = _scaled(value, _factor(value, WIDTH, epsilon), weight, offset, ONCE)
    tl.store(out + row * out_stride + column, value, mask=inside)


@triton.jit
def turn_kernel(
    joined,  # [R, H + 2 G, DIM] queries, keys and values
    positions,  # [R] int64
    places,  # [R] int64, where the rows' keys and values are stored
    cosines,  # [positions, ROTATED]
    sines,
    norms,  # [2, DIM] weights of norms of query heads and key heads, or [H + G, DIM] with WHOLE; read only with NORM
    query,  # out [R, H, DIM]
    keys,  # out [places, G, DIM]
    values,  # out [places, G, DIM]
    epsilon,
    offset,  # of weights
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,  # a norm is over all query heads, or all key heads, instead of each
    ALL: tl.constexpr,  # a power of 2 that holds what a norm is over; read only with WHOLE
    ONCE: tl.constexpr,
    PAIRS: tl.constexpr,  # neighbours are turned, and stored in different halves: products of queries and keys stay
):
    """Norm and rotate one head of a row, and store it where attention reads it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = joined + row * (HEADS + 2 * KV_HEADS) * DIM
    joined = heads + head * DIM
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    dtype = query.dtype.element_ty
    place = tl.load(places + row)
    if head >= HEADS + KV_HEADS:
        value = tl.load(joined + column, mask=inside, other=0.0)
        tl.store(values + (place * KV_HEADS + head - HEADS - KV_HEADS) * DIM + column, value, mask=inside)
    else:
        half: tl.constexpr = ROTATED // 2
        other = tl.where(column < half, column + half, column - half)
        turned = column < ROTATED
        source = column
        if PAIRS:
            source = tl.where(turned, tl.where(column < half, 2 * column, 2 * other + 1), column)
            other = tl.where(column < half, 2 * column + 1, 2 * other)
        value = tl.load(joined + source, mask=inside, other=0.0)
        partner = tl.load(joined + other, mask=turned, other=0.0)
        if NORM:
            of_keys = (head >= HEADS).to(tl.int32)
            if WHOLE:
                norms += head * DIM
                every, count = tl.arange(0, ALL), tl.where(head < HEADS, HEADS * DIM, KV_HEADS * DIM)
                whole = tl.load(heads + of_keys * HEADS * DIM + every, mask=every < count, other=0.0)
                factor = _factor(whole, count, epsilon)
            else:
                norms += of_keys * DIM
                factor = _factor(value, DIM, epsilon)
            value = _scaled(value, factor, tl.load(norms + source, mask=inside, other=0.0), offset, ONCE)
            partner = _scaled(partner, factor, tl.load(norms + other, mask=turned, other=0.0), offset, ONCE)
        rounded: tl.constexpr = cosines.dtype.element_ty  # products are rounded as angles are
        angle = tl.load(positions + row) * ROTATED + column
        cosine = tl.load(cosines + angle, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=turned, other=0.0).to(tl.float32)
        near = (value.to(tl.float32) * cosine).to(rounded).to(tl.float32)
        far = (partner.to(tl.float32) * sine).to(rounded).to(tl.float32)
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
    GELU: tl.constexpr,
):
    """``out = act(gate) * value``: SiLU, or GELU approximated by tanh, which is a product with a sigmoid too."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(joined + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(joined + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    open_ = (gate / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32)
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
