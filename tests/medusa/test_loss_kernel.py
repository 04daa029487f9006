"""The C++ kernel for losses, compared with torch in float64."""

import pytest
import torch

from medusa.cpu import losses
from medusa.cpu.native import available
from medusa.train.row_losses import ROW_LOSSES, Targets, replace_by_gradient

pytestmark = pytest.mark.skipif(not available(), reason="no C++ kernels here")
ROWS, TEACHERS = 33, 7
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def test_kinds_are_those_of_torch():
    assert tuple(ROW_LOSSES) == losses.KINDS


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("columns", [2, 16, 19, 5003])
@pytest.mark.parametrize("kind", losses.KINDS)
def test_losses_and_gradients_are_those_of_float64(kind, columns, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, columns) * 4).to(dtype)
    logits[0] = 0  # all equal: every label has the highest logit
    teacher = (torch.randn(TEACHERS, columns) * 4).to(dtype)
    teacher[0, 0] = teacher[0].max() + 60  # certain of one token
    labels, taught_by = torch.randint(columns, (ROWS,)), torch.randint(TEACHERS, (ROWS,))
    labels[1] = logits[1].float().argmax()
    replaced = logits.clone()
    targets = Targets(labels, kind, teacher, taught_by)
    assert losses.fits(replaced, teacher)
    loss, correct = replace_by_gradient(replaced, targets)

    exact = logits.double()
    targets = Targets(labels, kind, teacher.double(), taught_by)
    expected_loss, expected_correct = replace_by_gradient(exact, targets)
    assert correct.tolist() == expected_correct.tolist()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=2e-5, atol=2e-6)
    # Where both give a token the same probability, the gradient of acceptance jumps.
    ours, theirs = logits.double().softmax(1), teacher.double().softmax(1)[taught_by]
    smooth = (ours - theirs).abs() > 1e-5 * theirs
    assert smooth.double().mean() > 0.99
    torch.testing.assert_close(replaced.double()[smooth], exact[smooth], rtol=2 * ROUNDING[dtype], atol=2e-6)


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
