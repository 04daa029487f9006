"""Means and 95 % intervals, by a bootstrap over seeds and prompts.

A figure is a sum over seeds and prompts divided by another one: tokens by steps, hits by tries. Its interval comes from
drawing the seeds and the prompts again, with replacement, and taking the 2.5th and the 97.5th percentile of the figure.
Designs that are compared answer the same prompts, so a ratio of two draws those once for both, and seeds for each; two
trees of the same heads share both.
With few seeds such an interval is a little too narrow (three seeds have only ten different draws); with one it says
nothing about training at all.

Shapes: S seeds, P prompts, R draws.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: Tensor, draws_R: Tensor) -> "Estimate":
        """From the figure of the data and those of the draws."""
        tail = (1 - LEVEL) / 2
        low, high = draws_R.quantile(torch.tensor([tail, 1 - tail], dtype=draws_R.dtype)).tolist()
        return cls(float(value), low, high)


@dataclass(frozen=True)
class Rate:
    """What is summed above and below.

    Attributes:
        above: [S, P].
        below: [S, P].
    """

    above: Tensor
    below: Tensor

    def value(self) -> Tensor:
        """Sum by sum."""
        return self.above.double().sum() / self.below.double().sum().clamp(min=1)

    def draws(self, seeds_RS: Tensor, prompts_RP: Tensor) -> Tensor:
        """The figure [R] where seeds and prompts count as often as they were drawn."""
        above_R, below_R = (((seeds_RS @ sums_SP.double()) * prompts_RP).sum(1) for sums_SP in (self.above, self.below))
        return above_R / below_R.clamp(min=1)

    def estimate(self) -> Estimate:
        """The figure with its interval."""
        drawn = _Draws()
        seeds, prompts = self.above.shape
        return Estimate.of(self.value(), self.draws(drawn.counts(seeds), drawn.counts(prompts)))

    def over(self, other: "Rate", same_heads: bool = False) -> Estimate:
        """This figure divided by another one of the same prompts, and perhaps of the same heads."""
        drawn = _Draws()
        prompts_RP, ours_RS = drawn.counts(self.above.shape[1]), drawn.counts(len(self.above))
        theirs_RS = ours_RS if same_heads else drawn.counts(len(other.above))
        ratio_R = self.draws(ours_RS, prompts_RP) / other.draws(theirs_RS, prompts_RP)
        return Estimate.of(self.value() / other.value(), ratio_R)


class _Draws:
    """Draws with replacement; the same ones every time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def counts(self, size: int) -> Tensor:
        """How often [R, size] each of ``size`` things is drawn in ``size`` draws."""
        drawn_RS = torch.randint(size, (DRAWS, size), generator=self._generator)
        return torch.zeros(DRAWS, size, dtype=torch.float64).scatter_add_(1, drawn_RS, torch.ones(DRAWS, size).double())
