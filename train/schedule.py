"""Schedules as pure functions of the recipe and the step, so that nothing must be saved or restored."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from medusa.train.config import LoraRecipe, OptimRecipe, Recipe

ROUNDING = 0.2
"""Largest relative difference between asked and made epochs without a warning."""
ADAM_BETAS = (0.9, 0.999)
"""torch's defaults, which the engine uses."""


def total_steps(optim: OptimRecipe, num_rows: int) -> int:
    """Optimizer steps of the whole run, at least 1."""
    return optim.steps or max(1, round(optim.epochs * num_rows / optim.rows_per_step))


def doubts(optim: OptimRecipe, num_rows: int) -> Iterator[str]:
    """Warnings about steps and epochs that are not possible with this number of rows, one sentence each."""
    total = total_steps(optim, num_rows)
    epochs = total * optim.rows_per_step / num_rows
    made = f"{total} steps of {optim.rows_per_step} rows are {epochs:.3g} epochs of {num_rows} rows"
    if optim.steps and optim.epochs != OptimRecipe.epochs:
        yield f"optim.epochs ({optim.epochs}) is ignored, since optim.steps is given: {made}"
    elif not optim.steps and abs(epochs - optim.epochs) > ROUNDING * optim.epochs:
        yield f"optim.epochs ({optim.epochs}) cannot be reached: {made}; lower optim.rows_per_step, or add samples"


def learning_rate(optim: OptimRecipe, step: int, total: int) -> float:
    """Learning rate of step 0..total-1: linear warm-up, then a cosine down to lr * final_lr_ratio."""
    warmup = round(optim.warmup * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - 1 - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.final_lr_ratio + (1.0 - optim.final_lr_ratio) * cosine)


def rows_of_step(seed: int, step: int, rows_per_step: int, num_rows: int) -> Tensor:
    """Row indices of one step, int64 [rows_per_step], from a sequence of permutations, one per epoch."""
    first, last = step * rows_per_step, (step + 1) * rows_per_step
    epochs = range(first // num_rows, -(-last // num_rows))
    generators = (torch.Generator().manual_seed(mixed_seed(seed, epoch)) for epoch in epochs)
    chain = torch.cat([torch.randperm(num_rows, generator=generator) for generator in generators])
    offset = first - epochs.start * num_rows
    return chain[offset : offset + rows_per_step]


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


def column_weights(recipe: Recipe, step: int, total: int, counts: Tensor) -> Tensor:
    """Factor of each column's summed loss in a step, float32: the K heads, after the base if it is trained too.

    Args:
        recipe: the recipe.
        step: 0..total-1.
        total: steps of the run.
        counts: labels of the base and of the heads over the whole step, int64 [1 + K].
    """
    weights_K = head_weights(recipe.optim, counts[1:])
    if recipe.lora.rank == 0:
        return weights_K
    base = float(step >= resting_steps(recipe.lora, total)) / counts[:1].clamp(min=1)
    return torch.cat([base, heads_weight(recipe.lora, step, total) * weights_K])


def learning_rates(recipe: Recipe, step: int, total: int) -> list[float]:
    """Learning rates of the heads, and of the adapters if there are any, in step 0..total-1."""
    rate = learning_rate(recipe.optim, step, total)
    return [rate, adapters_rate(recipe.lora, step, total, rate)] if recipe.lora.rank else [rate]


def resting_steps(lora: LoraRecipe, total: int) -> int:
    """Steps at the start that train the heads alone."""
    return round(lora.heads_only * total)


def heads_weight(lora: LoraRecipe, step: int, total: int) -> float:
    """lambda_0: weight of the heads' loss relative to the base's in step 0..total-1."""
    first = resting_steps(lora, total)
    if lora.heads_schedule == "constant" or step < first:
        return lora.heads_weight
    return lora.heads_weight * math.sin(math.pi / 2 * (step + 1 - first) / (total - first))


def adapters_rate(lora: LoraRecipe, step: int, total: int, lr: float) -> float:
    """Learning rate of the adapters if that of the heads is `lr`; 0 in the first steps, which train the heads alone.

    Adam counts these steps too, although the adapters' moments stay 0 in them. Its bias correction would be that of all
    steps, and updates several times too large. So the rate includes the correction for the steps in which adapters
    train (Kingma and Ba 2015, section 3).
    """
    first = resting_steps(lora, total)
    if step < first:
        return 0.0
    return lr / lora.lr_ratio * _bias_correction(step + 1 - first) / _bias_correction(step + 1)


def _bias_correction(steps: int) -> float:
    """The factor by which Adam's bias correction multiplies the learning rate after `steps` steps."""
    first, second = ADAM_BETAS
    return math.sqrt(1.0 - second**steps) / (1.0 - first**steps)
