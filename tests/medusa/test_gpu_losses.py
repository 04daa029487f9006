"""The Triton kernel for losses, compared with torch in float64: on a GPU, or in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton")

from medusa.gpu import losses  # noqa: E402
from medusa.train.row_losses import ETA, LEAST_ACCEPTANCE, ROW_LOSSES, Targets, replace_by_gradient  # noqa: E402
from tests.medusa.loss_cases import COLUMNS, ROUNDING, check_losses  # noqa: E402

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not GPU and not triton.knobs.runtime.interpret, reason="there is no GPU")
DEVICE = "cuda" if GPU else "cpu"


def kernel(logits, targets):
    """``replace_by_gradient`` of logits anywhere."""
    given = (None, None) if targets.kind == "ce" else (targets.teacher, targets.teacher_index)
    return losses.replace_by_gradient(logits, targets.kind, targets.labels, *given, ETA, LEAST_ACCEPTANCE)


def test_kinds_are_those_of_torch():
    assert tuple(ROW_LOSSES) == losses.KINDS


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", losses.KINDS)
def test_losses_and_gradients_are_those_of_float64(kind, columns, dtype):
    check_losses(kernel, kind, columns, dtype, losses.fits, DEVICE)


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
