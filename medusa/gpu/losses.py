"""Losses of rows of logits in one Triton kernel, which reads each row a few times from the cache.

The same losses in torch are some twenty passes over float32 temporaries in the GPU's memory.
"""

import torch
import triton
from torch import Tensor

from medusa.cpu.losses import KINDS
from medusa.gpu.loss_kernel import loss_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 4096
"""Most columns of a row that are in registers at a time."""


def fits(logits: Tensor, teacher: Tensor | None) -> bool:
    """Whether the kernel reads these logits, which it overwrites, and those of the teacher."""
    return logits.dtype in DTYPES and logits.is_contiguous() and (teacher is None or teacher.dtype in DTYPES)


def replace_by_gradient(
    logits: Tensor,
    kind: str,
    labels: Tensor,
    teacher: Tensor | None,
    taught_by: Tensor | None,
    eta: float,
    least: float,
) -> tuple[Tensor, Tensor]:
    """Overwrite logits [R, V] with the gradients of their losses; see ``medusa.cpu.losses.replace_by_gradient``."""
    rows, columns = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    correct, labels = torch.empty_like(labels, memory_format=torch.contiguous_format), labels.contiguous()
    if kind == "ce":
        teacher, taught_by = logits, labels  # not read
    assert teacher is not None and taught_by is not None
    if rows:
        with torch.cuda.device_of(logits):
            loss_kernel[(rows,)](
                logits, teacher.contiguous(), taught_by.contiguous(), labels, loss, correct, columns, eta, least,
                KIND=KINDS.index(kind), BLOCK=min(COLUMNS, triton.next_power_of_2(columns)), num_warps=8,
            )  # fmt: skip
    return loss, correct
