"""The kernel for the losses of rows of logits (kernels/loss.h)."""

import ctypes

import torch
from torch import Tensor

from medusa.cpu.native import kernels, number_type, reads

KINDS = ("ce", "kl", "tv", "nla", "lk")
"""Losses in the order of ``LossKind``, and of the kernel for GPUs; ``medusa.train.row_losses`` defines them."""


class _Losing(ctypes.Structure):
    """``Losing`` of loss.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("number_type", "threads", "kind", "rows", "columns")],
        *[(name, ctypes.c_float) for name in ("eta", "least")],
        *[(name, ctypes.c_void_p) for name in ("logits", "teacher", "taught_by", "labels", "loss", "correct")],
    ]


def fits(logits: Tensor, teacher: Tensor | None) -> bool:
    """Whether the kernel reads these logits, which it overwrites, and those of the teacher."""
    return reads(logits) and logits.is_contiguous() and (teacher is None or reads(teacher))


def replace_by_gradient(
    logits: Tensor,
    kind: str,
    labels: Tensor,
    teacher: Tensor | None,
    taught_by: Tensor | None,
    eta: float,
    least: float,
) -> tuple[Tensor, Tensor]:
    """Overwrite logits [R, V] with the gradients of their losses.

    Args:
        logits: [R, V] for which ``fits`` is true.
        kind: One of ``KINDS``.
        labels: int64 [R].
        teacher: Logits [U, V] of the teacher; None for ce.
        taught_by: int64 [R], rows of ``teacher``; None for ce.
        eta: Rate at which ``lk`` changes from kl to tv.
        least: Smallest acceptance that ``nla`` takes the logarithm of.

    Returns:
        Losses float32 [R]; int64 [R], 1 where the label has the highest logit.
    """
    loss, correct = torch.empty(len(logits), dtype=torch.float32), torch.empty(len(logits), dtype=torch.int64)
    labels = labels.contiguous()
    at = [0, 0]
    if kind != "ce":
        assert teacher is not None and taught_by is not None
        teacher, taught_by = teacher.to(logits.dtype).contiguous(), taught_by.contiguous()
        at = [teacher.data_ptr(), taught_by.data_ptr()]
    kernels().medusa_losses(ctypes.byref(_Losing(
        number_type(logits.dtype), torch.get_num_threads(), KINDS.index(kind), *logits.shape, eta, least,
        logits.data_ptr(), *at, labels.data_ptr(), loss.data_ptr(), correct.data_ptr(),
    )))  # fmt: skip
    return loss, correct
