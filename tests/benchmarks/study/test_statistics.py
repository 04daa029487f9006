"""Intervals have the width that theory says, and comparisons are paired."""

import math

import pytest
import torch

from benchmarks.study.statistics import Estimate, Rate


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = torch.randn(1, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    estimate = Rate(values, torch.ones_like(values)).estimate()
    half = 1.96 * float(values.std()) / math.sqrt(400)
    assert estimate.value == pytest.approx(float(values.mean()))
    assert estimate.low == pytest.approx(estimate.value - half, abs=0.15 * half)
    assert estimate.high == pytest.approx(estimate.value + half, abs=0.15 * half)


def test_sums_are_divided_not_averaged() -> None:
    rate = Rate(torch.tensor([[10, 90]]), torch.tensor([[10, 30]]))
    assert rate.estimate().value == 2.5


def test_seeds_widen_the_interval() -> None:
    below = torch.ones(3, 50)
    same, different = torch.full((3, 50), 2.0), torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 50)
    assert Rate(same, below).estimate() == Estimate(2.0, 2.0, 2.0)
    wide = Rate(different, below).estimate()
    assert (wide.low, wide.value, wide.high) == (1.0, 2.0, 3.0)


def test_a_ratio_pairs_the_prompts() -> None:
    """Prompts that are hard for both designs say nothing about their ratio."""
    easy = torch.linspace(1, 9, 30)[None]
    below = torch.ones(1, 30)
    ratio = Rate(2 * easy, below).over(Rate(easy, below))
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert Rate(easy, below).estimate().high > 1.1 * Rate(easy, below).estimate().value


def test_a_ratio_of_two_trees_of_the_same_heads_pairs_the_seeds() -> None:
    seeds, below = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 20), torch.ones(3, 20)
    paired = Rate(2 * seeds, below).over(Rate(seeds, below), same_heads=True)
    assert (paired.low, paired.value, paired.high) == pytest.approx((2.0, 2.0, 2.0))
    assert Rate(2 * seeds, below).over(Rate(seeds, below)).high > 2.5


def test_estimates_are_the_same_every_time() -> None:
    rate = Rate(torch.tensor([[3, 5, 2], [4, 4, 1]]), torch.tensor([[2, 2, 2], [2, 3, 1]]))
    assert rate.estimate() == rate.estimate()


def test_nothing_tried_is_nothing_hit() -> None:
    assert Rate(torch.zeros(1, 2), torch.zeros(1, 2)).estimate() == Estimate(0.0, 0.0, 0.0)
