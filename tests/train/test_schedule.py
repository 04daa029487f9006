import math
from dataclasses import replace

import pytest
import torch

from medusa.train.config import LoraRecipe, OptimRecipe
from medusa.train.schedule import adapters_rate, head_weights, heads_weight, learning_rate, rows_of_step, total_steps


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


def test_lambda_is_constant_or_rises_along_a_sine_once_the_base_trains_too() -> None:
    constant = LoraRecipe(heads_weight=0.2, heads_only=0.5)
    assert {heads_weight(constant, step, 10) for step in range(10)} == {0.2}
    sine = replace(constant, heads_schedule="sine")
    values = [heads_weight(sine, step, 10) for step in range(10)]
    assert values[:5] == [0.2] * 5
    assert values[5:] == pytest.approx([0.2 * math.sin(math.pi / 2 * n / 5) for n in range(1, 6)])


def test_adapters_rest_and_then_move_as_under_an_adam_of_their_own() -> None:
    lora, total, resting = LoraRecipe(heads_only=0.75, lr_ratio=4.0), 200, 150
    weight, own = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    shared, alone = torch.optim.AdamW([weight]), torch.optim.AdamW([own], lr=1e-3 / 4)
    generator = torch.Generator().manual_seed(0)
    for step in range(total):
        shared.param_groups[0]["lr"] = adapters_rate(lora, step, total, lr=1e-3)
        gradient = torch.randn(3, generator=generator, dtype=torch.float64)
        weight.grad = torch.zeros_like(weight) if step < resting else gradient
        shared.step()
        if step < resting:
            assert not weight.any()
        else:
            own.grad = gradient
            alone.step()
    torch.testing.assert_close(weight, own, rtol=2e-3, atol=0)
    assert own.abs().min() > 1e-4
