"""The memory of the loss grows neither with heads nor with positions nor with the vocabulary."""

from weakref import finalize

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa.train import losses
from medusa.train.fused import Targets, fused_loss
from medusa.train.losses import chunk_rows

HIDDEN, LOSS_ROWS = 16, 128


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make while the mode is on, until they are freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = storages((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for storage in storages(out) - known:
            self.add(storage.nbytes())
            finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


def storages(values):
    return {leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def peak_bytes(action):
    with LiveBytes() as live:
        action()
    return live.peak


def loss_peak(heads, positions, vocab, kind):
    """Of forward and backward passes over micro-batches; kind "naive": K full logits and autograd."""
    torch.manual_seed(0)
    matrix, hidden = torch.randn(vocab, HIDDEN) / HIDDEN**0.5, torch.randn(positions, HIDDEN)
    labels = torch.randint(0, vocab, (positions, heads))

    def lm_head(rows):
        return functional.linear(rows, matrix)

    def step(hidden_MD, labels_MK):
        features_KMD = hidden_MD.repeat(heads, 1, 1).requires_grad_()
        if kind == "naive":
            each = zip(features_KMD, labels_MK.unbind(1), strict=True)
            torch.stack([functional.cross_entropy(lm_head(f), y, reduction="sum") for f, y in each]).sum().backward()
            return
        ahead_MK = torch.arange(len(hidden_MD))[:, None] + torch.arange(1, heads + 1)
        targets = Targets(labels_MK, kind, hidden_MD, ahead_MK.clamp(max=len(hidden_MD) - 1))
        rows = chunk_rows(LOSS_ROWS, vocab, torch.device("cpu"))
        fused_loss(features_KMD, targets, lm_head, chunk_rows=rows)[0].sum().backward()

    size = positions if kind == "naive" else max(1, LOSS_ROWS // heads)

    def run():
        for part in zip(hidden.split(size), labels.split(size), strict=True):
            step(*part)

    return peak_bytes(run)


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_memory_of_the_loss_is_flat_in_heads_rows_and_vocabulary(kind, monkeypatch):
    monkeypatch.setattr("medusa.train.row_losses.BLOCK_NUMEL", {"cpu": 1 << 15})
    monkeypatch.setattr(losses, "CHUNK_NUMEL", {"cpu": 1 << 18})
    least = loss_peak(1, 128, 2048, kind)
    assert least > 4 * (1 << 18)  # a chunk of logits, float32
    assert loss_peak(5, 128, 2048, kind) < 1.1 * least
    assert loss_peak(5, 256, 2048, kind) < 1.1 * least
    assert loss_peak(5, 256, 8192, kind) < 1.1 * least
    assert loss_peak(5, 256, 2048, "naive") > 5 * least
