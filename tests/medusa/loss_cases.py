"""Losses of rows by a kernel, compared with torch in float64."""

import torch

from medusa.train.row_losses import Targets, replace_by_gradient

ROWS, TEACHERS = 33, 7
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
COLUMNS = [2, 16, 19, 5003]


def check_losses(replace, kind, columns, dtype, fits, device="cpu"):
    """Losses and gradients are those of float64, where ``replace`` takes the arguments of ``replace_by_gradient``."""
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, columns) * 4).to(device, dtype)
    logits[0] = 0  # all equal: every label has the highest logit
    teacher = (torch.randn(TEACHERS, columns) * 4).to(device, dtype)
    teacher[0, 0] = teacher[0].max() + 60  # certain of one token
    labels, taught_by = (torch.randint(most, (ROWS,)).to(device) for most in (columns, TEACHERS))
    labels[1] = logits[1].float().argmax()
    replaced = logits.clone()
    assert fits(replaced, teacher)
    loss, correct = replace(replaced, Targets(labels, kind, teacher, taught_by))

    exact = logits.double()
    expected_loss, expected_correct = replace_by_gradient(exact, Targets(labels, kind, teacher.double(), taught_by))
    assert correct.tolist() == expected_correct.tolist()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=2e-5, atol=2e-6)
    # Where both give a token the same probability, the gradient of acceptance jumps.
    ours, theirs = logits.double().softmax(1), teacher.double().softmax(1)[taught_by]
    smooth = (ours - theirs).abs() > 1e-5 * theirs
    assert smooth.double().mean() > 0.99
    torch.testing.assert_close(replaced.double()[smooth], exact[smooth], rtol=2 * ROUNDING[dtype], atol=2e-6)
