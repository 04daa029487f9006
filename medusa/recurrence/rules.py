"""What recurrent layers compute, over the rows of trees.

A state is a matrix for each head. A token with key k, value v, decay g and rate b changes it to

    S' = exp(g) S + k u^T     u = b (v - exp(g) S^T k)   gated delta rule (Yang et al. 2024, eq. 10)
                              u = v                      Mamba 2 (Dao and Gu 2024): v = dt x, k = B, q = C, g = dt A

and its output is S'^T q. In a tree, the state before a node is the one after its parent. On a CPU a kernel goes from
node to node (``medusa.cpu.recurrence``), so that a row is equal bit by bit in every tree. Elsewhere no state of a node
is made: as in the chunks of a long text (Yang et al. 2024, section 3.3), the u of all rows solve one triangular system,
and each row sums over the rows that it follows: in a chunk all rows before it, here its ancestors.

Legend: B texts, R rows of each, H heads, Hk heads of keys, K and V the sizes of keys and values, C channels, W width of
a convolution.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu as torch_silu

from medusa.cpu import native, recurrence

CHUNK = 64
"""Rows of a chain that are computed together without the kernel."""


def recur(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    state: Tensor,
    seen: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Outputs of rows, and the state after a chain.

    Args:
        query: [B, R, Hk, K]; None = no outputs are needed.
        key: [B, R, Hk, K]; H is a multiple of Hk, and neighbours among heads share a query and a key.
        value: [B, R, H, V].
        decay: [B, R, H] logarithms of the factors on the state, at most 0.
        rate: [B, R, H] of the delta rule; None = values are added as they are.
        state: [B, H, K, V] before the first row.
        seen: [B, R, R] bool; entry (i, j) is true where j is i or an ancestor of i, and j comes before i. None = each
            row follows the row before.

    Returns:
        [B, R, H, V], and [B, H, K, V] or None for trees.
    """
    if key.is_cpu and key.dtype == torch.float32 and native.available():
        return recurrence.recur(query, key, value, decay, rate, state, seen)
    shared = value.shape[2] // key.shape[2]
    key = key.repeat_interleave(shared, dim=2)
    query = None if query is None else query.repeat_interleave(shared, dim=2)
    # Heads before rows, as products of matrices need them.
    query, rate = None if query is None else query.transpose(1, 2), None if rate is None else rate.transpose(1, 2)
    key, value, decay = key.transpose(1, 2), value.transpose(1, 2), decay.transpose(1, 2)
    if seen is not None:
        out, _ = _solve(query, key, value, decay, rate, state, seen)
        return None if out is None else out.transpose(1, 2), None
    outs, causal_1RR = [], torch.ones(1, CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    for first in range(0, key.shape[2], CHUNK):
        rows = slice(first, first + CHUNK)
        part_query, part_rate = None if query is None else query[:, :, rows], None if rate is None else rate[:, :, rows]
        part_key = key[:, :, rows]
        before = causal_1RR[:, : part_key.shape[2], : part_key.shape[2]]
        out, state = _solve(part_query, part_key, value[:, :, rows], decay[:, :, rows], part_rate, state, before)
        outs += [] if out is None else [out]
    return torch.cat(outs, dim=2).transpose(1, 2) if outs else None, state


def _solve(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor, seen: Tensor
) -> tuple[Tensor | None, Tensor]:
    """``recur`` of [B, H, R, ...]; the state is right if the rows are a chain."""
    seen = seen[:, None]
    total = (decay[..., None, :] * seen).sum(-1)  # logarithm of the factor from the state to each row
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    if rate is not None:
        value = value - total.exp()[..., None] * (key @ state)
        system = rate[..., None] * pairs * (key @ key.mT)  # its diagonal is taken for ones
        value = torch.linalg.solve_triangular(system, rate[..., None] * value, upper=False, unitriangular=True)
    out = None
    if query is not None:
        out = total.exp()[..., None] * (query @ state) + (pairs * (query @ key.mT)) @ value
    last = total[..., -1:]
    return out, last.exp()[..., None] * state + (key * (last - total).exp()[..., None]).mT @ value


def convolve(
    inputs_MC: Tensor, taken_RW: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool = False
) -> Tensor:
    """A causal convolution [R, C] of each channel, over inputs that stand anywhere.

    Args:
        inputs_MC: The inputs of rows, and those before them.
        taken_RW: int64, the inputs of each row in the order of their positions.
        weight_CW: The last column belongs to the row itself.
        bias_C: None = 0.
        silu: Whether SiLU follows.
    """
    if native.reads(inputs_MC):
        return recurrence.convolve(inputs_MC, taken_RW, weight_CW, bias_C, silu)
    out_RC = (inputs_MC[taken_RW].float() * weight_CW.T.float()).sum(1)
    out_RC = (out_RC if bias_C is None else out_RC + bias_C.float()).to(inputs_MC.dtype)
    return torch_silu(out_RC) if silu else out_RC
