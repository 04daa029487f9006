"""The Triton kernel of ``medusa.gpu.losses``. Legend: R rows, U teachers, V columns."""

import triton
import triton.language as tl


@triton.jit
def _load(row, start, columns, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32)


@triton.jit
def _normaliser(row, columns, BLOCK: tl.constexpr):
    """The largest logit of a row, and the sum of exponentials of the differences to it."""
    highest = tl.max(_load(row, 0, columns, BLOCK), 0)
    for start in range(BLOCK, columns, BLOCK):
        highest = tl.maximum(highest, tl.max(_load(row, start, columns, BLOCK), 0))
    total = 0.0
    for start in range(0, columns, BLOCK):
        total += tl.sum(tl.exp(_load(row, start, columns, BLOCK) - highest), 0)
    return highest, total


@triton.jit
def loss_kernel(
    logits,  # [R, V], in; out: the gradient
    teacher,  # [U, V] logits; not read if KIND is 0
    taught_by,  # [R] int64 rows of teacher; not read if KIND is 0
    labels,  # [R] int64
    loss,  # out [R] float32
    correct,  # out [R] int64, 1 where the label has the highest logit
    columns,  # V
    eta,
    least,
    KIND: tl.constexpr,  # ce, kl, tv, nla, lk
    BLOCK: tl.constexpr,
):
    """One row's loss and gradient, as ``medusa.train.row_losses`` computes them; q is the row's distribution."""
    index = tl.program_id(0).to(tl.int64)
    row, label = logits + index * columns, tl.load(labels + index)
    best, total = _normaliser(row, columns, BLOCK)
    score, divergence = 0.0, tl.log(total)
    target, target_best, target_total = row, best, total
    acceptance, slope, weight = 0.0, 0.0, 1.0
    if KIND > 0:
        target = teacher + tl.load(taught_by + index) * columns
        target_best, target_total = _normaliser(target, columns, BLOCK)
    if KIND > 1:  # sum min(p, q), and the sum of q where q < p
        for start in range(0, columns, BLOCK):
            q = tl.exp(_load(row, start, columns, BLOCK) - best) / total
            p = tl.exp(_load(target, start, columns, BLOCK) - target_best) / target_total
            acceptance += tl.sum(tl.minimum(p, q), 0)
            slope += tl.sum(tl.where(q < p, q, 0.0), 0)
    if KIND == 4:
        weight = tl.exp(-eta * acceptance)
    if KIND == 1 or KIND == 4:
        divergence -= tl.log(target_total)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _load(row, start, columns, BLOCK) - best
        q = tl.exp(x) / total
        # Not loaded by itself: another thread may have written the gradient there.
        score += tl.sum(tl.where(column == label, x, 0.0), 0)
        gradient = q - tl.where(column == label, 1.0, 0.0)
        if KIND > 0:
            y = _load(target, start, columns, BLOCK) - target_best
            p = tl.exp(y) / target_total
            gradient = q - p
            if KIND == 1 or KIND == 4:
                divergence += tl.sum(tl.where(p > 0, p * (y - x), 0.0), 0)
            if KIND > 1:
                closer = q * (slope - tl.where(q < p, 1.0, 0.0))  # of 1 - acceptance
                if KIND == 2:
                    gradient = closer
                elif KIND == 3:
                    gradient = closer / tl.maximum(acceptance, least)
                else:
                    gradient = closer + weight * (gradient - closer)
        tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=column < columns)
    tl.store(correct + index, tl.where(score == 0, 1, 0))
    distance = 1.0 - acceptance
    if KIND == 0:
        divergence -= score  # -log q(label)
    elif KIND == 2:
        divergence = distance
    elif KIND == 3:
        divergence = -tl.log(tl.maximum(acceptance, least))
    elif KIND == 4:
        divergence = distance + weight * (divergence - distance)
    tl.store(loss + index, divergence)
