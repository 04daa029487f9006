"""The C++ kernel for losses, compared with torch in float64."""

import pytest
import torch

from medusa.cpu import losses
from medusa.cpu.native import available
from medusa.train.row_losses import ROW_LOSSES, Targets, replace_by_gradient
from tests.medusa.loss_cases import COLUMNS, ROUNDING, check_losses

pytestmark = pytest.mark.skipif(not available(), reason="no C++ kernels here")


def test_kinds_are_those_of_torch():
    assert tuple(ROW_LOSSES) == losses.KINDS


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", losses.KINDS)
def test_losses_and_gradients_are_those_of_float64(kind, columns, dtype):
    check_losses(replace_by_gradient, kind, columns, dtype, losses.fits)


def test_threads_and_neighbours_change_nothing():
    torch.manual_seed(0)
    logits, teacher = torch.randn(64, 100), torch.randn(64, 100)
    labels, index = torch.randint(100, (64,)), torch.arange(64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            replaced = logits.clone()
            results.append((*replace_by_gradient(replaced, Targets(labels, "lk", teacher, index)), replaced))
    finally:
        torch.set_num_threads(before)
    alone = logits[5:6].clone()
    loss, _ = replace_by_gradient(alone, Targets(labels[5:6], "lk", teacher, index[5:6]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert torch.equal(alone, results[0][2][5:6])
    assert torch.equal(loss, results[0][0][5:6])


def test_no_rows():
    loss, correct = replace_by_gradient(torch.empty(0, 9), Targets(torch.empty(0, dtype=torch.int64)))
    assert loss.shape == correct.shape == (0,)
