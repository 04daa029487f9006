"""Measures methods alternately on the same prompts, and computes figures.

A time is that of a whole call, including the prefill. Each round begins with another method, and a ratio is of sums
over the same rounds, because a machine that is slow for a while is slow for all methods. Intervals (95 %) are bootstrap
intervals over rounds and prompts.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa.benchmarks.progress import Progress
from medusa.benchmarks.run.methods import PLAIN, Answers, Method

DRAWS = 4000
TAIL = 0.025
"""Share of bootstrap samples outside of the interval on each side."""


@dataclass(frozen=True)
class Rate:
    """A ratio of sums: numerators and denominators of each round and batch [R, G]."""

    above: Tensor
    below: Tensor

    def of(self, batches: Sequence[int]) -> "Rate":
        """The rate of some batches."""
        return Rate(self.above[:, batches], self.below[:, batches])

    def value(self) -> float:
        """Sum of numerators / sum of denominators."""
        return float(self.above.sum() / self.below.sum())

    def estimate(self, over: "Rate | None" = None) -> dict[str, float]:
        """The value and its interval; or those of the ratio to ``over``, a rate of the same rounds and batches.

        Bootstrap samples of rounds and batches are the same for both.
        """
        other, drawn_D = (over.value(), self._drawn() / over._drawn()) if over else (1.0, self._drawn())
        low, high = drawn_D.quantile(torch.tensor([TAIL, 1 - TAIL], dtype=drawn_D.dtype)).tolist()
        return {"value": self.value() / other, "low": low, "high": high}

    def _drawn(self) -> Tensor:
        generator, (rounds, batches) = torch.Generator().manual_seed(0), self.above.shape
        rounds_DR, batches_DG = (draws(size, generator) for size in (rounds, batches))
        above_D, below_D = (((rounds_DR @ sums) * batches_DG).sum(1) for sums in (self.above, self.below))
        return above_D / below_D


def draws(size: int, generator: torch.Generator) -> Tensor:
    """How often each of ``size`` items is drawn in ``size`` draws with replacement: float64 [DRAWS, size]."""
    drawn, counts = torch.randint(size, (DRAWS, size), generator=generator), torch.zeros(DRAWS, size).double()
    return counts.scatter_add_(1, drawn, torch.ones_like(counts))


class Timing:
    """The measurements of one method.

    Attributes:
        rate: Tokens per second.
        answers: Answers of the last round, by batch.
    """

    def __init__(self, seconds: Sequence[Sequence[float]], answers: Sequence[Sequence[Answers]]) -> None:
        tokens = [[float(sum(map(len, batch.tokens))) for batch in round_] for round_ in answers]
        self.rate = Rate(*(torch.tensor(values, dtype=torch.float64) for values in (tokens, seconds)))
        self.answers = answers[-1]

    @property
    def outputs(self) -> list[list[int]]:
        """Answers by prompt."""
        return [tokens for batch in self.answers for tokens in batch.tokens]

    def tokens_per_pass(self, batches: Sequence[int] | None = None) -> float | None:
        """Tokens per pass of the base; None if the method does not report passes."""
        some = [self.answers[index] for index in batches] if batches is not None else self.answers
        passes = [count for batch in some for count in batch.passes or ()]
        return sum(len(tokens) for batch in some for tokens in batch.tokens) / sum(passes) if passes else None


def measure(methods: Sequence[Method], prompts: Sequence[list[int]], batch: int, rounds: int) -> dict[str, Timing]:
    """Complete all prompts with every method, after one warm-up call.

    Args:
        methods: The methods; if ``batch`` is above 1, only those that support batches.
        prompts: Token ids of the prompts.
        batch: Prompts per call.
        rounds: Number of measured repetitions.
    """
    indices = [range(first, min(first + batch, len(prompts))) for first in range(0, len(prompts), batch)]
    groups, seeds = [[prompts[index] for index in group] for group in indices], [list(group) for group in indices]
    seconds: dict[str, list[list[float]]] = {method.name: [] for method in methods}
    answers: dict[str, list[list[Answers]]] = {method.name: [] for method in methods}
    with Progress(len(methods) * (1 + rounds * len(groups))) as progress:
        for method in methods:
            progress.stage(f"batch {batch}, warm-up: {method.name}")
            method.complete(groups[0], seeds[0])
            progress.update()
        for number in range(rounds):
            shift = number % len(methods)
            for method in (*methods[shift:], *methods[:shift]):
                progress.stage(f"batch {batch}, round {number + 1} of {rounds}: {method.name}")
                times, told = [], []
                for group, own in zip(groups, seeds, strict=True):
                    began = time.perf_counter()
                    told.append(method.complete(group, own))
                    times.append(time.perf_counter() - began)
                    progress.update()
                seconds[method.name].append(times)
                answers[method.name].append(told)
    return {method.name: Timing(seconds[method.name], answers[method.name]) for method in methods}


def figures(
    methods: Sequence[Method], timings: Mapping[str, Timing], kinds: Mapping[str, Sequence[int]], batch: int
) -> list[dict[str, Any]]:
    """A row per method.

    Args:
        methods: The measured methods.
        timings: Timings by method.
        kinds: Groups of prompts: name to indices; used only if ``batch`` is 1.
        batch: Prompts per call.
    """
    plain = timings[PLAIN]
    rows = []
    for method in methods:
        timing = timings[method.name]
        pairs = list(zip(timing.outputs, plain.outputs, strict=True))
        rows.append({
            "method": method.name,
            "ours": method.ours,
            "batch": batch,
            "tokens_per_s": timing.rate.estimate(),
            "over_plain": timing.rate.estimate(plain.rate),
            "tokens_per_pass": timing.tokens_per_pass(),
            "tokens": int(timing.rate.above[-1].sum()),
            "identical": sum(a == b for a, b in pairs),
            "prompts": len(pairs),
            "rounds": (timing.rate.above.sum(1) / timing.rate.below.sum(1)).tolist(),
            "kinds": {
                kind: {
                    "over_plain": timing.rate.of(own).value() / plain.rate.of(own).value(),
                    "tokens_per_pass": timing.tokens_per_pass(own),
                }
                for kind, own in kinds.items()
            } if batch == 1 else {},
        })  # fmt: skip
    return rows


def repeated_share(outputs: Sequence[list[int]]) -> float:
    """Share of 4-grams that occurred earlier in the same answer, since small models repeat themselves."""
    seen = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        total += len(grams)
        seen += len(grams) - len(set(grams))
    return seen / max(total, 1)
