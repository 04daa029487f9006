from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from data.packing import IGNORE
from medusa.heads import HeadsConfig, build_heads
from train.losses import HeadsLoss, chunked_cross_entropy

HEADS, ROWS, HIDDEN, VOCABULARY = 3, 37, 8, 19


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    features = torch.randn(HEADS, ROWS, HIDDEN, dtype=torch.float64) * 3
    labels = torch.randint(0, VOCABULARY, (ROWS, HEADS))
    labels[torch.rand(ROWS, HEADS) < 0.3] = IGNORE
    return features, labels, torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)


def _softcapped(matrix: torch.Tensor):
    return lambda rows: 5.0 * torch.tanh(functional.linear(rows, matrix) / 5.0)


def _naive(features: torch.Tensor, labels: torch.Tensor, project) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.stack([project(head, rows) for head, rows in enumerate(features)])
    losses = [
        functional.cross_entropy(rows, labels[:, head], ignore_index=IGNORE, reduction="sum")
        for head, rows in enumerate(logits)
    ]
    return torch.stack(losses), (labels == logits.argmax(2).T).sum(0)


@pytest.mark.parametrize("chunk_rows", [1, 5, 37, 1000])
@pytest.mark.parametrize("softcap", [False, True])
def test_shared_vocabulary_equals_the_naive_loss_with_gradients(chunk_rows: int, softcap: bool) -> None:
    features, labels, matrix = _inputs()
    lm_head = _softcapped(matrix) if softcap else lambda rows: functional.linear(rows, matrix)
    weights = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()

    loss, correct = chunked_cross_entropy(ours, labels, lm_head, chunk_rows=chunk_rows)
    expected, expected_correct = _naive(theirs, labels, lambda _, rows: lm_head(rows))
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()

    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    assert torch.equal(correct, expected_correct)


@pytest.mark.parametrize("chunk_rows", [5, 1000])
def test_own_vocabularies_equal_the_naive_loss_with_gradients(chunk_rows: int) -> None:
    features, labels, _ = _inputs()
    own = torch.randn(HEADS, VOCABULARY, HIDDEN, dtype=torch.float64)
    ours = [features.clone().requires_grad_(), own.clone().requires_grad_()]
    theirs = [features.clone().requires_grad_(), own.clone().requires_grad_()]

    loss, _ = chunked_cross_entropy(ours[0], labels, torch.relu, ours[1], chunk_rows)
    expected, _ = _naive(theirs[0], labels, lambda head, rows: functional.linear(rows, theirs[1][head]))
    (loss * 0.5).sum().backward()
    (expected * 0.5).sum().backward()

    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=0, atol=1e-6)


def test_certain_predictions_stay_finite() -> None:
    features = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    loss, correct = chunked_cross_entropy(features, torch.tensor([[1]]), lambda x: x @ torch.eye(2) * 500)
    loss.sum().backward()
    assert loss.tolist() == [500.0]
    assert correct.tolist() == [0]
    assert features.grad.isfinite().all()


def test_no_labels_give_a_zero_loss_that_still_has_a_gradient() -> None:
    heads = build_heads(HeadsConfig(hidden_size=HIDDEN, vocab_size=VOCABULARY, num_heads=HEADS, own_lm_heads=True))
    vocabulary = SimpleNamespace(logits=torch.relu)
    nothing = torch.zeros(0, HEADS, dtype=torch.int64)
    loss, _, _ = HeadsLoss(heads, vocabulary, chunk_rows=4)(torch.zeros(0, HIDDEN), nothing, nothing, torch.ones(HEADS))
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in heads.parameters())


def test_no_logits_of_all_rows_are_kept() -> None:
    rows, vocabulary, seen = 64, 1000, []

    def lm_head(chunk: torch.Tensor) -> torch.Tensor:
        seen.append(len(chunk))
        return functional.linear(chunk, torch.zeros(vocabulary, HIDDEN))

    saved: list[int] = []
    features = torch.randn(HEADS, rows, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        loss, _ = chunked_cross_entropy(features, torch.zeros(rows, HEADS, dtype=torch.int64), lm_head, chunk_rows=8)
    loss.sum().backward()
    assert max(seen) == 8
    # The vocabulary matrix [V, D] of each chunk is saved, never a [rows, V] tensor.
    assert max(saved) <= max(vocabulary * HIDDEN, HEADS * rows * HIDDEN)
