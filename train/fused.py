"""Losses after a vocabulary matrix that never keep [rows, V]: their gradient is computed in the forward pass.

The products with the vocabulary matrix run over chunks of rows, and the gradient of a chunk's logits overwrites them.
The loss itself runs over blocks of a chunk that are so small that float32 temporaries do not matter.

Shapes: M positions, K heads, R rows (pairs of position and head) of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from medusa.data.packing import IGNORE
from medusa.train.row_losses import LmHead, Targets, replace_by_gradient


def fused_loss(
    features_KMD: Tensor,
    targets: Targets,
    lm_head: LmHead,
    own_KVD: Tensor | None = None,
    chunk_rows: int = 512,
    weights_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses of K heads that never hold more than `chunk_rows` rows of logits, the teacher's included.

    With the shared, frozen vocabulary matrix a row costs two products: its logits and the gradient of its features.

    Args:
        features_KMD: inputs of the vocabulary matrix.
        targets: labels, and teachers for soft targets.
        lm_head: the base's output layer [rows, D] -> [rows, V], frozen and differentiable.
        own_KVD: the heads' own vocabulary matrices, or one [1, V, D] for all, which are trained too; then only one
            backward pass is possible.
        chunk_rows: rows of logits that exist at a time; at least 2 with teachers.
        weights_K: factors by which the losses will be multiplied, up to a common factor. Needed if several heads train
            one matrix, because its gradient is computed here.

    Returns:
        Loss summed over the labelled rows per head [K] (differentiable; nats for ce and kl), and the number of rows per
        head whose label has the highest logit [K], int64.
    """
    loss_K, correct_K = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        features_KMD, own_KVD, targets, lm_head, chunk_rows, weights_K
    )
    return loss_K, correct_K


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_KMD: Tensor,
        own_KVD: Tensor | None,
        targets: Targets,
        lm_head: LmHead,
        chunk_rows: int,
        weights_K: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        loss_K = features_KMD.new_zeros(len(features_KMD), dtype=torch.promote_types(features_KMD.dtype, torch.float32))
        correct_K = targets.labels.new_zeros(len(features_KMD))
        grad_KMD = torch.zeros_like(features_KMD)
        grad_own_KVD = None if own_KVD is None else torch.zeros_like(own_KVD)
        by_head = own_KVD is not None and len(own_KVD) > 1
        for position_R, head_R, own in _chunks(targets, chunk_rows, by_head):
            inputs = [features_KMD[head_R, position_R]] + ([] if own_KVD is None else [own_KVD[own]])
            project = lm_head if own_KVD is None else functional.linear
            weights_R = None if weights_K is None else weights_K[head_R]
            loss_R, correct_R, grads = _chunk_loss(inputs, project, targets.at(position_R, head_R, lm_head), weights_R)
            loss_K.index_add_(0, head_R, loss_R.to(loss_K.dtype))
            correct_K.index_add_(0, head_R, correct_R)
            grad_KMD[head_R, position_R] = grads[0]
            if grad_own_KVD is not None:
                grad_own_KVD[own] += grads[1]
            del grads  # may hold a matrix: free it before the next chunk
            torch.clear_autocast_cache()  # otherwise autocast keeps a rounded copy of the matrix per chunk
        ctx.save_for_backward(grad_KMD, grad_own_KVD, weights_K)
        ctx.mark_non_differentiable(correct_K)
        return loss_K, correct_K

    @staticmethod
    def backward(ctx: Any, grad_loss_K: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_KMD, grad_own_KVD, weights_K = ctx.saved_tensors
        if weights_K is None:
            scale_K11 = grad_loss_K[:, None, None]
        else:  # the gradients include the weights already
            weights_K = weights_K.to(grad_loss_K)
            scale_K11 = (grad_loss_K @ weights_K / (weights_K @ weights_K).clamp(min=1e-30))[None, None, None]
        if grad_own_KVD is not None:
            grad_own_KVD.mul_(scale_K11.to(grad_own_KVD.dtype))  # in place: it is as large as all trained weights
        return grad_KMD * scale_K11.to(grad_KMD.dtype), grad_own_KVD, None, None, None, None


def _chunks(targets: Targets, chunk_rows: int, by_head: bool) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Chunks of labelled pairs (positions [R], heads [R]), and the head of the chunk if `by_head`, else 0.

    Pairs are sorted by position, so that they share teachers, or by head. There is at least one chunk, which may be
    empty.
    """
    rows = chunk_rows if targets.kind == "ce" else max(1, chunk_rows // 2)  # each row may have its own teacher
    labelled_MK = targets.labels != IGNORE
    for first, group in enumerate(labelled_MK.split(1 if by_head else labelled_MK.shape[1], dim=1)):
        for pairs in group.nonzero().split(rows):
            yield pairs[:, 0], pairs[:, 1] + first, first


def _chunk_loss(
    inputs: list[Tensor], project: Callable[..., Tensor], targets: Targets, weights_R: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Losses [R] of `project(*inputs)`, whether the label is best [R], and weighted gradients of the inputs."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        logits_RV = project(*inputs)
    # The logits may be overwritten: autograd raises an error if the gradient of the output layer needs them.
    loss_R, correct_R = replace_by_gradient(logits_RV.detach(), targets)
    if weights_R is not None:
        logits_RV.detach().mul_(weights_R[:, None].to(logits_RV.dtype))
    return loss_R, correct_R, torch.autograd.grad(logits_RV, inputs, logits_RV.detach())
