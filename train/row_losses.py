"""Losses of single rows of logits and their gradients, written out.

Shapes: R rows of a chunk, B rows of a block, U teachers, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Logits that are looked at together: on a CPU they stay in its cache, on a GPU they keep it busy."""


def replace_by_gradient(
    logits_RV: Tensor, labels_R: Tensor, kind: str, teacher_UV: Tensor | None, teacher_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Overwrite logits with the gradient of their rows' losses, a block at a time in float32 or wider.

    Args:
        logits_RV: any floating dtype; changed in place.
        labels_R: int64 token ids.
        kind: a key of `ROW_LOSSES`.
        teacher_UV: logits of the distributions that are the targets; None for ce.
        teacher_R: int64, which of them is the row's; None for ce.

    Returns:
        Losses [R], at least float32; int64 [R], 1 where the label has the highest logit.
    """
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    loss_R, correct_R = logits_RV.new_zeros(len(logits_RV), dtype=dtype), torch.zeros_like(labels_R)
    block = max(1, BLOCK_NUMEL[logits_RV.device.type] // logits_RV.shape[1])
    for start in range(0, len(logits_RV), block):
        rows = slice(start, start + block)
        scores_BV, labels_B1 = logits_RV[rows].to(dtype), labels_R[rows, None]
        scores_BV = scores_BV - scores_BV.amax(1, keepdim=True)  # the best score is 0: exponentials cannot overflow
        teacher_BV = None if teacher_UV is None or teacher_R is None else teacher_UV[teacher_R[rows]].to(dtype)
        loss_R[rows], gradient_BV = ROW_LOSSES[kind](scores_BV, labels_B1, teacher_BV)
        correct_R[rows] = (scores_BV.gather(1, labels_B1) == 0).squeeze(1).long()
        logits_RV[rows] = gradient_BV
    return loss_R, correct_R


def _cross_entropy(scores_BV: Tensor, labels_B1: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """-log q(label); its gradient is q - one-hot."""
    probs_BV, normaliser_B1 = _softmax(scores_BV)
    loss_B1 = normaliser_B1 - scores_BV.gather(1, labels_B1)
    return loss_B1.squeeze(1), probs_BV.scatter_add_(1, labels_B1, probs_BV.new_full(labels_B1.shape, -1.0))


def _divergence(scores_BV: Tensor, _: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q), p the teacher's distribution; its gradient is q - p."""
    teacher_BV = teacher_BV - teacher_BV.amax(1, keepdim=True)
    probs_BV, normaliser_B1 = _softmax(scores_BV)
    target_BV, target_normaliser_B1 = _softmax(teacher_BV)
    loss_B1 = (target_BV * (teacher_BV - scores_BV)).sum(1, keepdim=True) - target_normaliser_B1 + normaliser_B1
    return loss_B1.squeeze(1), probs_BV.sub_(target_BV)


def _total_variation(scores_BV: Tensor, _: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor]:
    """1/2 sum |q - p|; with s = 1/2 sign(q - p) its gradient is q (s - sum q s)."""
    probs_BV, _normaliser = _softmax(scores_BV)
    target_BV, _normaliser = _softmax(teacher_BV - teacher_BV.amax(1, keepdim=True))
    difference_BV = target_BV.neg_().add_(probs_BV)
    loss_B = difference_BV.abs().sum(1) / 2
    slope_BV = difference_BV.sign_().div_(2)
    slope_BV -= (probs_BV * slope_BV).sum(1, keepdim=True)
    return loss_B, probs_BV.mul_(slope_BV)


def _softmax(scores_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and log sum exp [B, 1], of rows whose best score is 0."""
    exponentials_BV = scores_BV.exp()
    total_B1 = exponentials_BV.sum(1, keepdim=True)
    return exponentials_BV.div_(total_B1), total_B1.log()


ROW_LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ce": _cross_entropy,
    "kl": _divergence,
    "tv": _total_variation,
}
"""(scores [B, V] whose best is 0, labels [B, 1], the teacher's logits [B, V]) -> losses [B], gradients [B, V]."""
