"""The mathematics of the ``speculative`` rule; random numbers are arguments.

Legend: B batch, N tree nodes, V vocabulary.
"""

import torch
from torch import Tensor

from medusa.tree import Draft


def rejection_chances(draft: Draft, draft_probs_BNV: Tensor, target_probs_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance probability of each child after its earlier siblings were rejected, and p after all were rejected.

    Child x, drawn from q, is accepted with probability min(1, p(x) / q(x)); a rejection changes p to
    norm(max(0, p - q)). Together these give every token exactly its probability under p, for any q.

    Source: SpecInfer (Miao et al. 2023), algorithm 2; siblings drawn without replacement: Jeon et al. 2024.

    Args:
        draft: The trees; siblings are tried in the order of their indices.
        draft_probs_BNV: [B, N, V] q, from which each node's token was drawn; the root's row is not read.
        target_probs_BNV: [B, N, V] p, the base's distribution of the token after each node.

    Returns:
        Probability [B, N] that each node is accepted, 0 for the root, and the distribution [B, N, V] of the token after
        each node given that all of its children were rejected.
    """
    if draft.real is not None:  # padding is never tried
        draft_probs_BNV = draft_probs_BNV * draft.real[..., None]
    left_BNV = target_probs_BNV.clone()
    chances = [torch.zeros_like(left_BNV[:, 0, 0])]
    for node in range(1, draft.tokens.shape[1]):
        parent_B1V = draft.parents[:, node, None, None].expand_as(left_BNV[:, :1])
        q_BV = draft_probs_BNV[:, node]
        p_BV = left_BNV.gather(1, parent_B1V)[:, 0]
        p_B, q_B = (probs_BV.gather(1, draft.tokens[:, node, None])[:, 0] for probs_BV in (p_BV, q_BV))
        chances.append(torch.where(q_B > 0, p_B / q_B, 0.0).clamp(max=1.0))
        residual_BV = (p_BV - q_BV).clamp(min=0.0)
        mass_B1 = residual_BV.sum(-1, keepdim=True)
        residual_BV = torch.where(mass_B1 > 0, residual_BV / mass_B1, p_BV)  # no mass: p = q, which is never rejected
        left_BNV.scatter_(1, parent_B1V, residual_BV[:, None])
    return torch.stack(chances, dim=1), left_BNV


def first_accepted(draft: Draft, passed_BN: Tensor) -> Tensor:
    """Edges [B, N] bool: the first child of each node that passed; the root must not have passed."""
    siblings_BNN = draft.parents[:, :, None] == draft.parents[:, None]
    elder_BNN = siblings_BNN.tril(diagonal=-1)
    return passed_BN & ~(elder_BNN & passed_BN[:, None]).any(-1)
