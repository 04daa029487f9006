import pytest
import torch

from train.config import OptimRecipe
from train.schedule import head_weights, learning_rate, rows_of_step, total_steps


def test_every_row_comes_once_per_epoch_in_another_order() -> None:
    order = torch.cat([rows_of_step(seed=3, step=step, rows_per_step=4, num_rows=10) for step in range(5)])
    first, second = order[:10].tolist(), order[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_step_may_span_several_epochs_and_depends_on_seed_and_step_alone() -> None:
    chain = torch.cat([rows_of_step(0, step, 2, 3) for step in range(6)])
    assert torch.equal(torch.cat([rows_of_step(0, step, 6, 3) for step in range(2)]), chain)
    assert not torch.equal(rows_of_step(1, 0, 100, 100), rows_of_step(0, 0, 100, 100))


def test_learning_rate_warms_up_and_falls_to_the_end() -> None:
    optim = OptimRecipe(lr=1.0, warmup=0.2, final_lr_ratio=0.1)
    rates = [learning_rate(optim, step, total=10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(OptimRecipe(lr=1.0, warmup=0.0), 0, total=1) == 1.0


def test_total_steps() -> None:
    assert total_steps(OptimRecipe(epochs=2.0, rows_per_step=8), num_rows=40) == 10
    assert total_steps(OptimRecipe(epochs=0.01), num_rows=5) == 1
    assert total_steps(OptimRecipe(steps=7), num_rows=5) == 7


def test_heads_weigh_less_with_their_distance() -> None:
    weights = head_weights(OptimRecipe(head_decay=0.5), torch.tensor([4, 2, 0]))
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.25, 0.25]))
