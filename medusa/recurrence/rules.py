"""What recurrent layers compute, over the rows of trees.

A state is a matrix for each head. A token with key k, value v, decay g and rate b changes it to

    S' = exp(g) S + k u^T     u = b (v - exp(g) S^T k)   gated delta rule (Yang et al. 2024, eq. 10)
                              u = v                      Mamba 2 (Dao and Gu 2024): v = dt x, k = B, q = C, g = dt A

and its output is S'^T q. In a tree, the state before a node is the one after its parent. No state of a node is ever
made: as in the chunks of a long text (Yang et al. 2024, section 3.3), the u of all rows solve one triangular system,
and each row then sums over its ancestors. In a chunk each row follows all rows before it; here a mask names the rows
that it follows.

Legend: B texts, R rows of each, H heads, K and V the sizes of keys and values, C channels, W width of a convolution.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Rows of a chain that are computed together."""


def recur(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor, seen: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Outputs of rows, and the state after all of them, which is right if they are a chain.

    Args:
        query: [B, H, R, K]; None = no outputs are needed.
        key: [B, H, R, K].
        value: [B, H, R, V].
        decay: [B, H, R] logarithms of the factors on the state.
        rate: [B, H, R] of the delta rule; None = values are added as they are.
        state: [B, H, K, V] before the first row.
        seen: [B or 1, R, R] bool; entry (i, j) is true where j is i or an ancestor of i, and j comes before i.

    Returns:
        [B, H, R, V] and [B, H, K, V].
    """
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


def recur_chain(
    query: Tensor | None, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor | None, Tensor]:
    """``recur`` over rows that each follow the row before, of any number."""
    outs = []
    causal_1RR = torch.ones(1, CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    for first in range(0, key.shape[2], CHUNK):
        parts = (None if x is None else x[:, :, first : first + CHUNK] for x in (query, key, value, decay, rate))
        part_query, part_key, part_value, part_decay, part_rate = parts
        assert part_key is not None and part_value is not None and part_decay is not None, "only two may be missing"
        size = part_key.shape[2]
        out, state = recur(part_query, part_key, part_value, part_decay, part_rate, state, causal_1RR[:, :size, :size])
        outs.append(out)
    return (None if query is None else torch.cat([out for out in outs if out is not None], dim=2)), state


def convolve(inputs_MC: Tensor, taken_RW: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """A causal convolution [R, C] of each channel, over inputs that stand anywhere.

    Args:
        inputs_MC: The inputs of rows, and those before them.
        taken_RW: int64, the inputs of each row in the order of their positions.
        weight_CW: The last column belongs to the row itself.
        bias_C: None = 0.
    """
    out_RC = (inputs_MC[taken_RW].float() * weight_CW.T.float()).sum(1)
    return (out_RC if bias_C is None else out_RC + bias_C.float()).to(inputs_MC.dtype)
