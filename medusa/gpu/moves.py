"""Moves of accepted keys and values, in all layers by one kernel: torch would start four per layer."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from medusa.gpu.kernels import move_kernel


def fits(buffers: Sequence[Tensor]) -> bool:
    """Whether the kernel moves rows of these buffers [blocks, size, G, d]: alike, on one GPU."""
    alike = {(one.device, one.dtype, one.shape) for one in buffers}
    return len(alike) == 1 and buffers[0].is_cuda and all(one.is_contiguous() for one in buffers)


def move_rows(buffers: Sequence[Tensor], addresses: Tensor, sources_SA: Tensor, targets_SA: Tensor) -> None:
    """Copy rows of every buffer to other rows, one sequence beside the other.

    Args:
        buffers: [blocks, size, G, d] keys and values, for which ``fits`` is true.
        addresses: int64, the buffers' addresses on their device.
        sources_SA: int64 rows, counted over all blocks.
        targets_SA: int64 rows; an entry is no source of a later entry of its sequence.
    """
    width = buffers[0].shape[2:].numel()
    with torch.cuda.device_of(buffers[0]):
        move_kernel[(len(buffers), len(sources_SA))](
            addresses, buffers[0], sources_SA.contiguous(), targets_SA.contiguous(), sources_SA.shape[1],
            WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
