"""Losses of rows of logits with explicit gradients.

Shapes: M positions, K heads, R rows of a chunk, B rows of a block, U teachers, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa import gpu
from medusa.cpu import losses

LmHead = Callable[[Tensor], Tensor]
ETA = 3.0
"""Rate at which the hybrid loss changes to total variation distance (Samarin et al. 2026, arXiv 2602.23881)."""
LEAST_ACCEPTANCE = 1e-30
BLOCK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Number of logits that are processed at a time: on a CPU they fit its cache, on a GPU they keep it busy."""


@dataclass(frozen=True)
class Targets:
    """Targets of the logits of K heads at M positions, or of R rows."""

    labels: Tensor
    """int64 token ids [M, K] or [R]; `IGNORE` where a head has no target."""
    kind: str = "ce"
    """A name in `ROW_LOSSES`: ce = the targets are the labels; others = the teacher's distributions."""
    teacher: Tensor | None = None
    """The base's last hidden states [U, D] whose distributions are the targets, or of rows their logits [U, V]."""
    teacher_index: Tensor | None = None
    """int64 rows of `teacher`, in the shape of the labels; valid where there is a label."""

    def __post_init__(self) -> None:
        if self.kind != "ce" and (self.teacher is None or self.teacher_index is None):
            raise ValueError(f"loss ({self.kind}) needs the base's distributions; pass their hidden states and index")

    def at(self, position_R: Tensor, head_R: Tensor, lm_head: LmHead) -> "Targets":
        """The targets of rows (pairs of position and head); only the teachers in use go through `lm_head`."""
        labels_R = self.labels[position_R, head_R]
        if self.kind == "ce" or self.teacher is None or self.teacher_index is None:
            return Targets(labels_R)
        used_U, teacher_R = self.teacher_index[position_R, head_R].unique(return_inverse=True)
        return Targets(labels_R, self.kind, lm_head(self.teacher[used_U]), teacher_R)


def replace_by_gradient(logits_RV: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Overwrite logits (any floating dtype) with the gradient of their rows' losses.

    Returns:
        Losses [R], float32 or wider; int64 [R], 1 where the label has the highest logit.
    """
    kernels = gpu.module("losses") if logits_RV.is_cuda else losses
    if kernels is not None and kernels.fits(logits_RV, targets.teacher):
        loss_R, correct_R = kernels.replace_by_gradient(
            logits_RV, targets.kind, targets.labels, targets.teacher, targets.teacher_index, ETA, LEAST_ACCEPTANCE
        )
        return loss_R, correct_R
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    loss_R, correct_R = logits_RV.new_zeros(len(logits_RV), dtype=dtype), torch.zeros_like(targets.labels)
    block = max(1, BLOCK_NUMEL[logits_RV.device.type] // logits_RV.shape[1])
    for start in range(0, len(logits_RV), block):
        rows = slice(start, start + block)
        scores_BV, labels_B1 = _scores(logits_RV[rows], dtype), targets.labels[rows, None]
        teacher_BV = None
        if targets.teacher is not None and targets.teacher_index is not None:
            teacher_BV = _scores(targets.teacher[targets.teacher_index[rows]], dtype)
        loss_R[rows], logits_RV[rows] = ROW_LOSSES[targets.kind](scores_BV, labels_B1, teacher_BV)
        correct_R[rows] = (scores_BV.gather(1, labels_B1) == 0).squeeze(1).long()
    return loss_R, correct_R


def _scores(logits_BV: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits minus the best one of each row, so that exponentials cannot overflow."""
    return (scores_BV := logits_BV.to(dtype)) - scores_BV.amax(1, keepdim=True)


def _cross_entropy(scores_BV: Tensor, labels_B1: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """-log q(label); its gradient is q - one-hot."""
    probs_BV, normaliser_B1 = _softmax(scores_BV)
    loss_B1 = normaliser_B1 - scores_BV.gather(1, labels_B1)
    return loss_B1.squeeze(1), probs_BV.scatter_add_(1, labels_B1, probs_BV.new_full(labels_B1.shape, -1.0))


def _divergence(scores_BV: Tensor, _: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q), p the teacher's distribution; its gradient is q - p."""
    probs_BV, normaliser_B1 = _softmax(scores_BV)
    target_BV, target_normaliser_B1 = _softmax(teacher_BV)
    loss_B1 = (target_BV * (teacher_BV - scores_BV)).sum(1, keepdim=True) - target_normaliser_B1 + normaliser_B1
    return loss_B1.squeeze(1), probs_BV.sub_(target_BV)


def _total_variation(scores_BV: Tensor, _: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor]:
    """1/2 sum |q - p| = 1 - sum min(p, q)."""
    acceptance_B, gradient_BV = _acceptance(scores_BV, teacher_BV)
    return 1 - acceptance_B, gradient_BV.neg_()


def _negative_log_acceptance(scores_BV: Tensor, _: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): the gradient of total variation distance, larger where little of a draft is accepted."""
    acceptance_B, gradient_BV = _acceptance(scores_BV, teacher_BV)
    acceptance_B.clamp_(min=LEAST_ACCEPTANCE)
    return -acceptance_B.log(), gradient_BV.div_(acceptance_B[:, None]).neg_()


def _acceptance(scores_BV: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor]:
    """sum min(p, q); with s = 1 where q < p, else 0, its gradient is q (s - sum q s). Small sums stay exact."""
    probs_BV, _ = _softmax(scores_BV)
    target_BV, _ = _softmax(teacher_BV)
    acceptance_B = torch.minimum(probs_BV, target_BV).sum(1)
    slope_BV = (probs_BV < target_BV).to(probs_BV.dtype)
    slope_BV -= (probs_BV * slope_BV).sum(1, keepdim=True)
    return acceptance_B, probs_BV.mul_(slope_BV)


def _hybrid(scores_BV: Tensor, _: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor]:
    """w KL + (1 - w) TV with w = exp(-ETA acceptance), a constant for the gradient."""
    distance_B, gradient_BV = _total_variation(scores_BV, _, teacher_BV)
    divergence_B, away_BV = _divergence(scores_BV, _, teacher_BV)
    weight_B = (-ETA * (1 - distance_B)).exp()
    return distance_B.lerp(divergence_B, weight_B), gradient_BV.lerp_(away_BV, weight_B[:, None])


def _softmax(scores_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and log sum exp [B, 1], of rows whose best score is 0."""
    exponentials_BV = scores_BV.exp()
    total_B1 = exponentials_BV.sum(1, keepdim=True)
    return exponentials_BV.div_(total_B1), total_B1.log()


ROW_LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ce": _cross_entropy,
    "kl": _divergence,
    "tv": _total_variation,
    "nla": _negative_log_acceptance,
    "lk": _hybrid,
}
"""(scores [B, V], labels [B, 1], the teachers' scores [B, V]) -> losses [B], gradients [B, V]; best scores are 0."""
