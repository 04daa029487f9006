"""What a step depends on, as pure functions of the recipe and the step: nothing to save, nothing to restore."""

import math

import torch
from torch import Tensor

from train.config import OptimRecipe


def total_steps(optim: OptimRecipe, num_rows: int) -> int:
    """Optimizer steps of the whole run, at least 1."""
    return optim.steps or max(1, round(optim.epochs * num_rows / optim.rows_per_step))


def learning_rate(optim: OptimRecipe, step: int, total: int) -> float:
    """Learning rate of step 0..total-1: linear warm-up, then a cosine down to lr * final_lr_ratio."""
    warmup = round(optim.warmup * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - 1 - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.final_lr_ratio + (1.0 - optim.final_lr_ratio) * cosine)


def rows_of_step(seed: int, step: int, rows_per_step: int, num_rows: int) -> Tensor:
    """Row indices of one step, int64 [rows_per_step], out of an endless chain of permutations, one per epoch."""
    first, last = step * rows_per_step, (step + 1) * rows_per_step
    epochs = range(first // num_rows, -(-last // num_rows))
    chain = torch.cat([_permutation(seed, epoch, num_rows) for epoch in epochs])
    offset = first - epochs.start * num_rows
    return chain[offset : offset + rows_per_step]


def _permutation(seed: int, epoch: int, num_rows: int) -> Tensor:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(mixed_seed(seed, epoch)))


def mixed_seed(seed: int, index: int) -> int:
    """A seed for epoch or step `index` of a run; below 2 ** 32 because torch ignores the higher bits on a CPU."""
    return (seed * 1_000_003 + index) % 2**32


def head_weights(optim: OptimRecipe, counts_K: Tensor) -> Tensor:
    """Factor of each head's summed loss: lambda_k / labels of head k in the whole step, float32 [K].

    Args:
        optim: the recipe's head_decay; lambda_k = head_decay ** (k - 1).
        counts_K: labels per head over all processes and micro-batches of the step.
    """
    lambda_K = optim.head_decay ** torch.arange(len(counts_K), dtype=torch.float32)
    return lambda_K / counts_K.clamp(min=1)
