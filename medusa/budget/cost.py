"""What steps cost, and how many nodes are worth it.

The principle: tokens per second of a long run are largest when each step maximises

    E[tokens of the step] - rate * seconds of the step,        rate = tokens per second of the engine as it is,

and the rate settles at the best one that can be reached (Dinkelbach 1967; renewal reward). So a node is admitted while
the probability that it is accepted exceeds rate * dT/dN, a further level is drafted while its expected gain exceeds
rate * its seconds, and nothing is drafted where even the best draft does not pay: N = 1 is a size like the others.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

STEEP = 4.0
"""Larger trees are left out once a step takes so many times a plain one."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds on this machine.

    Attributes:
        nodes: Tree sizes that were measured, ascending from 1.
        seconds: Of a step (verify, accept, commit) with so many nodes; made non-decreasing.
        begin: Seconds that the first level of a draft takes, 0 where drafting is part of ``seconds``.
        level: Seconds that each further level takes.

    Raises:
        ValueError: Sizes and seconds do not belong together.
    """

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    begin: float = 0.0
    level: float = 0.0

    def __post_init__(self) -> None:
        nodes, seconds = tuple(self.nodes), tuple(self.seconds)
        ascending = all(isinstance(size, int) for size in nodes) and all(a < b for a, b in pairwise(nodes))
        if not ascending or nodes[:1] != (1,) or len(nodes) != len(seconds):
            raise ValueError(f"step costs: sizes ({nodes}) must ascend from 1, with one time each; measure them again")
        times = (*seconds, self.begin, self.level)
        if not all(math.isfinite(time) and time >= 0 for time in times) or not min(seconds) > 0:
            raise ValueError(f"step costs: times ({times}) must be positive seconds; measure them again")
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "seconds", _non_decreasing(seconds))

    @property
    def most(self) -> int:
        """The largest size that is known."""
        return self.nodes[-1]

    @cached_property
    def table(self) -> Tensor:
        """[most + 1] float64 seconds by size; entry 0 is not used."""
        return torch.tensor([0.0, *(self.step(size) for size in range(1, self.most + 1))], dtype=torch.float64)

    def step(self, nodes: int) -> float:
        """Seconds of a step with ``nodes`` nodes, between two measured sizes on a straight line."""
        place = bisect_left(self.nodes, nodes)
        if place == len(self.nodes):
            raise ValueError(f"nodes ({nodes}) exceed the largest measured size ({self.most}); draft fewer")
        if self.nodes[place] == nodes:
            return self.seconds[place]
        (low, high), (before, after) = self.nodes[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return before + (after - before) * (nodes - low) / (high - low)

    def batched(self, sequences: int) -> "StepCosts":
        """Costs of steps of so many sequences, from those of one: a pass costs what its rows cost, whoever's they are.

        Beyond the largest size that was measured, rows cost what they cost between the last sizes. Drafting is taken to
        cost as much for each sequence, which is rather too much (measured: 3 times as much for 4, 10 times for 16).
        """
        if sequences == 1:
            return self
        plain, sizes = self._rows(sequences), [1]
        for size in self.nodes[1:]:
            if self._rows(size * sequences) > STEEP * plain:
                break
            sizes.append(size)
        seconds = tuple(self._rows(size * sequences) for size in sizes)
        return StepCosts(tuple(sizes), seconds, sequences * self.begin, sequences * self.level)

    def _rows(self, rows: int) -> float:
        """Seconds of a step over so many rows, on a straight line behind the last measured size."""
        if rows <= self.most or self.most == 1:
            return self.step(min(rows, self.most))
        before = max(1, self.most // 2)
        slope = (self.step(self.most) - self.step(before)) / (self.most - before)
        return self.step(self.most) + slope * (rows - self.most)

    def draft(self, levels: int) -> float:
        """Seconds of drafting ``levels`` levels."""
        return self.begin + (levels - 1) * self.level if levels else 0.0

    def worth(self, gains_C: Tensor, rate: float, nodes: int = 1) -> tuple[int, float]:
        """How many further nodes pay.

        Args:
            gains_C: [C] expected tokens that each next node adds, the best first.
            rate: Tokens per second that the time would bring otherwise.
            nodes: Nodes that the step has already.

        Returns:
            The number of nodes, 0 to C, and the expected tokens that they bring beyond what their time is worth.
        """
        room = min(len(gains_C), self.most - nodes)
        if room <= 0:
            return 0, 0.0
        extra_C = self.table[nodes + 1 : nodes + 1 + room] - self.table[nodes]
        best, index = (gains_C[:room].double().cumsum(0) - rate * extra_C).max(0)
        return (int(index) + 1, float(best)) if best > 0 else (0, 0.0)

    def to_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StepCosts":
        """The same again.

        Raises:
            ValueError: It is not what ``to_json`` writes.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"step costs cannot be read ({error}); measure them again") from error

    def __str__(self) -> str:
        """For logs and screens: a few sizes with their milliseconds."""
        shown = [size for size in self.nodes if size in (1, 8, 16, 32, 64)]
        times = ", ".join(f"{1e3 * self.step(size):.3g}" for size in shown)
        draft = f", a level of drafting {1e3 * self.level:.2g} ms" if self.level else ""
        return f"a step of {'/'.join(map(str, shown))} nodes takes {times} ms{draft}"


def best_fixed(costs: StepCosts, tokens_per_step: Callable[[int], float]) -> int:
    """The measured size with the most tokens per second, the smallest of equals.

    Args:
        costs: Of whole steps with drafts of so many nodes.
        tokens_per_step: Expected tokens of a step by its number of nodes.
    """
    return max(costs.nodes, key=lambda size: (tokens_per_step(size) / costs.step(size), -size))


def _non_decreasing(values: Sequence[float]) -> tuple[float, ...]:
    """The closest non-decreasing sequence: neighbours in the wrong order share their mean (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return tuple(mean for mean, count in pools for _ in range(count))
