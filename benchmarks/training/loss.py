"""Memory and time of the loss: features in, gradient of the features out.

Shapes: M positions, K heads, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.training.memory import peak_bytes
from medusa.clock import alternate, seconds
from train.fused import Targets, fused_loss
from train.losses import chunk_rows

NAIVE = "naive"
NAIVE_MICRO = "naive, same micro-batches"
OURS = "ours"
OURS_KL = "ours, kl"
NAIVE_EXTRA = 2
"""Float32 tensors [M, V] that the naive loss needs beside the log-probabilities of K heads."""


class LossCase:
    """K heads at M positions of one step, with random features and labels.

    Args:
        heads: K.
        positions: M.
        vocab: V.
        hidden: D.
        loss_rows: rows of logits per micro-batch, as `engine.loss_rows` of a recipe.
        dtype: of the vocabulary matrix and of the products with it.
        device: where.
    """

    def __init__(
        self,
        heads: int,
        positions: int,
        vocab: int,
        hidden: int,
        loss_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        torch.manual_seed(0)
        self.heads, self.loss_rows = heads, loss_rows
        self.matrix_VD = torch.randn(vocab, hidden, device=device).to(dtype) / hidden**0.5
        self.hidden_MD = torch.randn(positions, hidden, device=device)
        self.labels_MK = torch.randint(0, vocab, (positions, heads), device=device)
        self.naive_bytes = 4 * (heads + NAIVE_EXTRA) * positions * vocab

    def lm_head(self, rows: Tensor) -> Tensor:
        """Logits [..., V]."""
        return functional.linear(rows.to(self.matrix_VD.dtype), self.matrix_VD)

    def run(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor], positions: int) -> None:
        """Forward and backward, `positions` positions at a time."""
        micro_batches = zip(self.hidden_MD.split(positions), self.labels_MK.split(positions), strict=True)
        for hidden_MD, labels_MK in micro_batches:
            features_KMD = hidden_MD.repeat(self.heads, 1, 1).requires_grad_()
            loss(features_KMD, labels_MK, hidden_MD).backward()

    def engines(self) -> dict[str, Callable[[], None]]:
        """Everything that is compared, by name."""
        whole, micro = len(self.hidden_MD), max(1, self.loss_rows // self.heads)
        return {
            NAIVE: lambda: self.run(self._naive, whole),
            NAIVE_MICRO: lambda: self.run(self._naive, micro),
            OURS: lambda: self.run(self._fused("ce"), micro),
            OURS_KL: lambda: self.run(self._fused("kl"), micro),
        }

    def _naive(self, features_KMD: Tensor, labels_MK: Tensor, _: Tensor) -> Tensor:
        losses = [
            functional.cross_entropy(self.lm_head(features_MD).float(), labels_M, reduction="sum")
            for features_MD, labels_M in zip(features_KMD, labels_MK.unbind(1), strict=True)
        ]
        return torch.stack(losses).sum()

    def _fused(self, kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        rows = chunk_rows(self.loss_rows, len(self.matrix_VD), self.matrix_VD.device)

        def loss(features_KMD: Tensor, labels_MK: Tensor, hidden_MD: Tensor) -> Tensor:
            # As in a text: head k at position t learns from the base at t + k.
            ahead_MK = torch.arange(len(hidden_MD), device=hidden_MD.device)[:, None] + torch.arange(
                1, self.heads + 1, device=hidden_MD.device
            )
            targets = Targets(labels_MK, kind, hidden_MD, ahead_MK.clamp(max=len(hidden_MD) - 1))
            return fused_loss(features_KMD, targets, self.lm_head, chunk_rows=rows)[0].sum()

        return loss


def measure_loss(
    heads: Sequence[int],
    positions: Sequence[int],
    vocab: Sequence[int],
    hidden: int,
    loss_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    free: int,
) -> list[dict[str, Any]]:
    """Peak memory, and median seconds of `rounds` rounds, of every engine in every case.

    Args:
        heads: values of K.
        positions: values of M.
        vocab: values of V.
        hidden: D.
        loss_rows: rows of logits per micro-batch.
        dtype: of the vocabulary products.
        device: where.
        rounds: timed rounds.
        free: bytes that may be used; what needs more at once is left out.

    Returns:
        One row per case and engine; `peak_mb` (10^6 bytes) and `ms` are None where it does not fit.
    """
    rows: list[dict[str, Any]] = []
    for size, count, num_heads in product(vocab, positions, heads):
        case = LossCase(num_heads, count, size, hidden, loss_rows, dtype, device)
        engines = case.engines()
        if case.naive_bytes > free:
            del engines[NAIVE]
        peaks = {name: peak_bytes(engine, device) for name, engine in engines.items()}
        clocks = {name: partial(seconds, engine, device) for name, engine in engines.items()}
        times = alternate(clocks, rounds)
        rows += [
            {
                "vocab": size,
                "positions": count,
                "heads": num_heads,
                "loss": name,
                "peak_mb": round(peaks[name] / 1e6, 2) if name in peaks else None,
                "ms": round(1000 * median(times[name]), 2) if name in times else None,
            }
            for name in (NAIVE, NAIVE_MICRO, OURS, OURS_KL)
        ]
    return rows
