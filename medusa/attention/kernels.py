"""Triton kernels of tree attention: split-K flash decoding over packed rows, then a merge of the splits.

The g query heads that share a key head are packed into one block of rows, row r = node * g + group, so a block reads
every key and value once for all of them. A grid of (row blocks, B * Hkv, splits) divides the rows of the cache among
the splits; each writes a normalised output and a log-sum-exp, which the second kernel weighs against each other.
Exponents are to base 2 throughout: the hardware has no other.

Legend: L cached rows of a sequence, N tree nodes, D and Dv head sizes.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["nodes"])
def split_kernel(
    query,  # [B, H, N, D] by strides
    key,  # [B, Hkv, S, D] by strides
    value,  # [B, Hkv, S, Dv] by strides
    lengths,  # [B] integers, L
    words,  # [B, N, ceil(N / 32)] int32 ancestor bits
    depths,  # [B, N] int32; read only where there is a window
    partial,  # out [splits, B * Hkv, N * g, Dv] float32
    partial_lse,  # out [splits, B * Hkv, N * g] float32, to base 2; -inf where a split has nothing for a row
    q_batch,
    q_head,
    q_node,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    nodes,
    kv_heads,
    scaling,
    softcap,  # None = no cap
    window,  # None = full attention
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of the cache for one block of rows of one key head."""
    pair, split = tl.program_id(1), tl.program_id(2)
    batch, head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    length = tl.load(lengths + batch).to(tl.int32)
    words += batch * nodes * ((nodes + 31) // 32)
    depths += batch * nodes
    key += batch * k_batch + head.to(tl.int64) * k_head
    value += batch * v_batch + head.to(tl.int64) * v_head

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < nodes * GROUPS
    node = row // GROUPS
    dim, dim_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_at = batch * q_batch + (head * GROUPS + row % GROUPS).to(tl.int64) * q_head + node.to(tl.int64) * q_node
    q = tl.load(query + q_at[:, None] + dim[None, :], mask=is_row[:, None] & (dim < DIM)[None, :], other=0.0)
    q = q.to(tl.float32) if UPCAST else q

    end = length + nodes
    first = 0
    if window is not None:  # every node stands at L or later: rows before L - window + 1 are hidden from all
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
    for start in range(low, dense, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        k = tl.load(key + column[:, None] * k_row + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
        v = tl.load(value + column[:, None] * v_row + dim_v[None, :], mask=(dim_v < DIM_V)[None, :], other=0.0)
        top, total, acc = _accumulate(q, k, v, None, top, total, acc, scaling, softcap, UPCAST)
    EDGE_STAGES: tl.constexpr = 1 if window is None else 2  # without a window too short to fill a pipeline
    for start in tl.range(dense, high, BLOCK_N, num_stages=EDGE_STAGES):
        column = start + tl.arange(0, BLOCK_N)
        is_key = (column < end)[:, None]  # what lies behind is never read: it may hold anything
        k = tl.load(key + column[:, None] * k_row + dim[None, :], mask=is_key & (dim < DIM)[None, :], other=0.0)
        v = tl.load(value + column[:, None] * v_row + dim_v[None, :], mask=is_key & (dim_v < DIM_V)[None, :], other=0.0)
        visible = _visible(column, node, is_row, length, nodes, words, depths, window)
        top, total, acc = _accumulate(q, k, v, visible, top, total, acc, scaling, softcap, UPCAST)

    pairs = tl.num_programs(1)
    out = (split * pairs + pair).to(tl.int64) * nodes * GROUPS + row
    found = total > 0
    total = tl.where(found, total, 1.0)
    tl.store(partial_lse + out, tl.where(found, top + tl.log2(total), float("-inf")), mask=is_row)
    written = (is_row & found)[:, None] & (dim_v < DIM_V)[None, :]
    tl.store(partial + out[:, None] * DIM_V + dim_v[None, :], acc / total[:, None], mask=written)


@triton.jit
def _visible(column, node, is_row, length, nodes, words, depths, window):
    """[BLOCK_M, BLOCK_N]: cached rows and ancestors, within the window."""
    other = column - length
    in_tree = (other >= 0) & (other < nodes)
    word_at = node[:, None] * ((nodes + 31) // 32) + (other >> 5)[None, :]
    word = tl.load(words + word_at, mask=is_row[:, None] & in_tree[None, :], other=0)
    visible = (other < 0)[None, :] | (((word >> (other & 31)[None, :]) & 1) != 0)
    if window is not None:
        position = tl.load(depths + node, mask=is_row, other=0) + length
        key_depth = tl.load(depths + other, mask=in_tree, other=0)
        key_position = tl.where(in_tree, length + key_depth, column)
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
    partial,  # [splits, B * Hkv, rows, Dv] float32
    partial_lse,  # [splits, B * Hkv, rows] float32
    sinks,  # [H], None = no sinks
    out,  # [B, N, H, Dv] contiguous
    rows,  # N * g
    kv_heads,
    splits,
    GROUPS: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One row: the outputs of its splits, weighted by how much of the softmax each of them saw."""
    row, pair, pairs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    head = pair % kv_heads * GROUPS + row % GROUPS
    at = (split * pairs + pair).to(tl.int64) * rows + row
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
    batch, node = (pair // kv_heads).to(tl.int64), row // GROUPS
    out_at = ((batch * (rows // GROUPS) + node) * kv_heads * GROUPS + head) * DIM_V
    tl.store(out + out_at + dim, result.to(out.dtype.element_ty), mask=dim < DIM_V)
