"""Triton kernels of tree attention: split-K flash decoding over packed rows, then a merge of the splits.

The g query heads that share a key head are packed into one block of rows, row r = node * g + group, so a block reads
every key and value once for all of them. A grid of (blocks of rows, Hkv, splits) divides the positions of each sequence
among the splits; each writes a normalised output and a log-sum-exp, by which the second kernel weights the outputs.
Keys and values are found through the table of blocks. All exponents are to base 2, as in the hardware.

Legend: S sequences, L cached positions of a sequence, R rows of all trees, n nodes of one, D and Dv head sizes.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows", "width", "table_stride"])
def split_kernel(
    query,  # [R, H, D] by strides
    key,  # [blocks, SIZE, Hkv, D]
    value,  # [blocks, SIZE, Hkv, Dv]
    work,  # [blocks of rows, 4] int32: sequence, first packed row in its tree, the tree's first row in R, n
    lengths,  # [S] integers, L
    table,  # [S, blocks of each] integers by stride
    words,  # [R, width] int32 ancestor bits
    depths,  # [R] int32; read only with a window
    partial,  # out [splits, Hkv, R * g, Dv] float32
    partial_lse,  # out [splits, Hkv, R * g] float32, to base 2; -inf if a row sees no key of a split
    q_row,
    q_head,
    table_stride,
    rows,  # R
    width,
    kv_heads,
    scaling,
    softcap,  # None = no cap
    window,  # None = full attention
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of a sequence for one block of rows of one key head."""
    work += 4 * tl.program_id(0)
    head, split = tl.program_id(1), tl.program_id(2)
    sequence, first_row = tl.load(work).to(tl.int64), tl.load(work + 2).to(tl.int64)
    nodes = tl.load(work + 3)
    length = tl.load(lengths + sequence).to(tl.int32)
    table += sequence * table_stride
    words += first_row * width
    depths += first_row
    key += head * DIM
    value += head * DIM_V

    row = tl.load(work + 1) + tl.arange(0, BLOCK_M)
    is_row = row < nodes * GROUPS
    node = row // GROUPS
    q_at = (first_row + node) * q_row + (head * GROUPS + row % GROUPS) * q_head
    dim, dim_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q = tl.load(query + q_at[:, None] + dim[None, :], mask=is_row[:, None] & (dim < DIM)[None, :], other=0.0)
    q = q.to(tl.float32) if UPCAST else q

    end = length + nodes
    first = 0
    if window is not None:  # every node is at position L or later: positions before L - window + 1 are hidden
        first = tl.maximum(length - window + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(end - first, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    low = first + split * share
    high = tl.minimum(low + share, end)
    dense = low  # up to here every row sees every key
    if window is None:
        dense = tl.maximum(tl.minimum(high, length // BLOCK_N * BLOCK_N), low)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # The table is read one iteration ahead, so that keys need not wait for their addresses.
    block = _blocks(table, low, high, SIZE, BLOCK_N)
    for start in range(low, dense, BLOCK_N):
        place = _places(block, start, SIZE, BLOCK_N) * kv_heads
        block = _blocks(table, start + BLOCK_N, high, SIZE, BLOCK_N)
        k = tl.load(key + place[:, None] * DIM + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
        v = tl.load(value + place[:, None] * DIM_V + dim_v[None, :], mask=(dim_v < DIM_V)[None, :], other=0.0)
        top, total, acc = _accumulate(q, k, v, None, top, total, acc, scaling, softcap, UPCAST)
    EDGE_STAGES: tl.constexpr = 1 if window is None else 2  # without a window the loop is too short for a pipeline
    for start in tl.range(dense, high, BLOCK_N, num_stages=EDGE_STAGES):
        column = start + tl.arange(0, BLOCK_N)
        is_key = column < end  # later places are undefined and never read
        place = _places(block, start, SIZE, BLOCK_N) * kv_heads
        block = _blocks(table, start + BLOCK_N, high, SIZE, BLOCK_N)
        k_mask, v_mask = is_key[:, None] & (dim < DIM)[None, :], is_key[:, None] & (dim_v < DIM_V)[None, :]
        k = tl.load(key + place[:, None] * DIM + dim[None, :], mask=k_mask, other=0.0)
        v = tl.load(value + place[:, None] * DIM_V + dim_v[None, :], mask=v_mask, other=0.0)
        visible = _visible(column, node, is_row, length, nodes, words, width, depths, window)
        top, total, acc = _accumulate(q, k, v, visible, top, total, acc, scaling, softcap, UPCAST)

    out = ((split * kv_heads + head).to(tl.int64) * rows + first_row) * GROUPS + row
    found = total > 0
    total = tl.where(found, total, 1.0)
    tl.store(partial_lse + out, tl.where(found, top + tl.log2(total), float("-inf")), mask=is_row)
    written = (is_row & found)[:, None] & (dim_v < DIM_V)[None, :]
    tl.store(partial + out[:, None] * DIM_V + dim_v[None, :], acc / total[:, None], mask=written)


@triton.jit
def _blocks(table, start, end, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N] int32: the block of each position from ``start`` on; 0 from ``end`` on."""
    column = start + tl.arange(0, BLOCK_N)
    return tl.load(table + column // SIZE, mask=column < end, other=0).to(tl.int32)


@triton.jit
def _places(block, start, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N] int64: places of the positions from ``start`` on, a multiple of BLOCK_N. Sizes are powers of two."""
    return block.to(tl.int64) * SIZE + start % SIZE + tl.arange(0, BLOCK_N) % SIZE


@triton.jit
def _visible(column, node, is_row, length, nodes, words, width, depths, window):
    """[BLOCK_M, BLOCK_N]: whether a key is a cached position or an ancestor, and within the window."""
    other = column - length
    in_tree = (other >= 0) & (other < nodes)
    word_at = node[:, None] * width + (other >> 5)[None, :]
    word = tl.load(words + word_at, mask=is_row[:, None] & in_tree[None, :], other=0)
    visible = (other < 0)[None, :] | (((word >> (other & 31)[None, :]) & 1) != 0)
    if window is not None:
        position = tl.load(depths + node, mask=is_row, other=0) + length
        key_position = tl.where(in_tree, tl.load(depths + other, mask=in_tree, other=0) + length, column)
        visible = visible & (position[:, None] - key_position[None, :] < window)
    return visible


@triton.jit
def _accumulate(q, k, v, visible, top, total, acc, scaling, softcap, UPCAST: tl.constexpr):
    """One step of the running softmax: largest exponent, sum of weights, weighted sum of values."""
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if softcap is not None:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = scores * LOG2E
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_kernel(
    partial,  # [splits, Hkv, rows, Dv] float32
    partial_lse,  # [splits, Hkv, rows] float32
    sinks,  # [H], None = no sinks
    out,  # [R, H, Dv]
    rows,  # R * g
    splits,
    GROUPS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One row: the outputs of its splits, weighted by each split's part of the softmax."""
    row, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    head = kv_head * GROUPS + row % GROUPS
    at = (split * kv_heads + kv_head).to(tl.int64) * rows + row
    lse = tl.load(partial_lse + at, mask=split < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    seen = (lse > float("-inf"))[:, None] & (dim < DIM_V)[None, :]
    parts = tl.load(partial + at[:, None] * DIM_V + dim[None, :], mask=seen, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    out_at = ((row // GROUPS).to(tl.int64) * kv_heads * GROUPS + head) * DIM_V
    tl.store(out + out_at + dim, result.to(out.dtype.element_ty), mask=dim < DIM_V)
