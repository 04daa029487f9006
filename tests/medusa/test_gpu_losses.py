"""The Triton kernel for losses, compared with torch in float64: on a GPU, or in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton")

from medusa.gpu import losses  # noqa: E402
from medusa.train.row_losses import ETA, LEAST_ACCEPTANCE, ROW_LOSSES, Targets, replace_by_gradient  # noqa: E402

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not GPU and not triton.knobs.runtime.interpret, reason="there is no GPU")
DEVICE = "cuda" if GPU else "cpu"
ROWS, TEACHERS = 33, 7
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def test_kinds_are_those_of_torch():
    assert tuple(ROW_LOSSES) == losses.KINDS


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("columns", [2, 19, 5003])
@pytest.mark.parametrize("kind", losses.KINDS)
def test_losses_and_gradients_are_those_of_float64(kind, columns, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, columns) * 4).to(DEVICE, dtype)
    logits[0] = 0  # all equal: every label has the highest logit
    teacher = (torch.randn(TEACHERS, columns) * 4).to(DEVICE, dtype)
    teacher[0, 0] = teacher[0].max() + 60  # certain of one token
    labels, taught_by = (torch.randint(most, (ROWS,)).to(DEVICE) for most in (columns, TEACHERS))
    labels[1] = logits[1].float().argmax()
    replaced = logits.clone()
    assert losses.fits(replaced, teacher)
    given = (None, None) if kind == "ce" else (teacher, taught_by)
    loss, correct = losses.replace_by_gradient(replaced, kind, labels, *given, ETA, LEAST_ACCEPTANCE)

    exact = logits.double()
    expected_loss, expected_correct = replace_by_gradient(exact, Targets(labels, kind, teacher.double(), taught_by))
    assert correct.tolist() == expected_correct.tolist()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=2e-5, atol=2e-6)
    # Where both give a token the same probability, the gradient of acceptance jumps.
    ours, theirs = logits.double().softmax(1), teacher.double().softmax(1)[taught_by]
    smooth = (ours - theirs).abs() > 1e-5 * theirs
    assert smooth.double().mean() > 0.99
    torch.testing.assert_close(replaced.double()[smooth], exact[smooth], rtol=2 * ROUNDING[dtype], atol=2e-6)


def test_no_rows():
    empty = torch.empty(0, dtype=torch.int64, device=DEVICE)
    loss, correct = losses.replace_by_gradient(torch.empty(0, 9, device=DEVICE), "ce", empty, None, None, 0.0, 0.0)
    assert loss.shape == correct.shape == (0,)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_it_is_used_on_a_gpu(monkeypatch):
    called = []
    monkeypatch.setattr(losses, "replace_by_gradient", lambda *given: called.append(given) or (None, None))
    replace_by_gradient(torch.zeros(3, 5, device=DEVICE), Targets(torch.zeros(3, dtype=torch.int64, device=DEVICE)))
    assert called
