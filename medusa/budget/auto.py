"""Tree sizes that nobody has to give (``nodes=None``): from what steps cost on this machine."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache

from medusa.acceptance import BuiltRule
from medusa.base.model import BaseModel
from medusa.budget.calibration import Calibration
from medusa.budget.cost import StepCosts, best_fixed
from medusa.budget.measure import facts, known_costs, measure_fixed, measure_passes, with_drafting
from medusa.budget.priced import Experience, PricedDrafter
from medusa.budget.record import Average
from medusa.budget.tree_search import grow_tree, typical_tree
from medusa.drafters import Drafter, HybridDrafter
from medusa.engine.output import Output
from medusa.engine.steps import StartSteps
from medusa.heads import DraftHeads

logger = logging.getLogger(__name__)

TokensPerStep = Callable[[int], float]
"""Expected tokens of a step by its number of nodes."""
DOUBT = 64.0
"""Expected drafted tokens after which completions count more than what is expected of heads."""
CLOCK: Callable[[], float] | None = time.perf_counter
"""Tells how long steps take; None = as long as they are priced."""
WATCHED = 64
"""Drafters of fixed sizes whose completions are learned from, the latest ones."""


class FixedSize:
    """One tree size for whole completions, where shapes are fixed: the best by what completions before have shown.

    N = 1 is among the sizes. Then drafts are tried again after 1, 2, 4, ... completions.

    Args:
        costs: Of whole steps.
        tokens_per_step: What is expected, before there are completions.
    """

    def __init__(self, costs: StepCosts, tokens_per_step: TokensPerStep) -> None:
        self.costs = costs
        self._expected, self._share = tokens_per_step, Average(1.0, DOUBT)
        self._left, self._next = 1, 1

    def choose(self) -> int:
        """The size for the next completions."""
        best = best_fixed(self.costs, self.tokens_per_step)
        if best > 1 or self.costs.most == 1:
            self._left = self._next = 1
            return best
        self._left -= 1
        if self._left >= 0:
            return 1
        self._next *= 2
        self._left = self._next
        return max(self.costs.nodes[1:], key=lambda size: self.tokens_per_step(size) / self.costs.step(size))

    def tokens_per_step(self, nodes: int) -> float:
        """What is expected now, after the completions that were seen."""
        return 1.0 + self._share.value * (self._expected(nodes) - 1.0)

    def observe(self, nodes: int, outputs: Sequence[Output]) -> None:
        """Learn from completions of this size."""
        steps = sum(output.steps for output in outputs)
        drafted = sum(len(output.tokens) for output in outputs) - steps
        self._share.add(drafted, steps * (self._expected(nodes) - 1.0))


class AutoNodes:
    """Costs, and what follows from them, by way of drafting, size of batch, and what the rule computes.

    Batches are measured as the next power of two: a measurement takes about a second.

    Args:
        base: Prepared for decoding.
        heads: Its heads, frozen.
        calibration: How often they are right; None = as typical heads.

    Attributes:
        reason: The last choice and why, in one line.
    """

    def __init__(self, base: BaseModel, heads: DraftHeads | None, calibration: Calibration | None = None) -> None:
        self._base, self._heads, self._calibration = base, heads, calibration
        self._known: dict[tuple[bool, str], StepCosts] = {}
        self._priced: dict[tuple[str, str, int], tuple[StepCosts, Experience]] = {}
        self._fixed: dict[tuple[str, str, int], FixedSize] = {}
        self._watched: OrderedDict[tuple[int, str, int], tuple[FixedSize, int, Drafter]] = OrderedDict()
        self.reason = ""

    def priced(self, name: str, batch: int, rule: BuiltRule) -> PricedDrafter:
        """A drafter of that name for the next completions, sized step by step; it knows what others have learned."""
        slots, heads = _bucket(batch), None if name == "prompt-lookup" else self._heads
        key = (name, rule.work, slots)
        if key not in self._priced:
            costs = self._costs(heads, rule).batched(slots)
            self._priced[key] = costs, Experience(costs.step(1))
        costs, experience = self._priced[key]
        self._tell(f"nodes auto: in each step as many of at most {costs.most} as pay; {costs}")
        return PricedDrafter(costs, self._base, heads, name != "heads", experience, CLOCK)

    def _costs(self, heads: DraftHeads | None, rule: BuiltRule) -> StepCosts:
        """Of one sequence; known once for all that share a base, heads and a rule."""
        key = (heads is None, rule.work)
        if key not in self._known:
            known_by = facts(self._base, heads, 1, "host", rule.work)
            if heads is None:
                self._known[key] = known_costs(known_by, lambda: measure_passes(self._base, rule))
            else:
                passes = self._costs(None, rule)  # what prompt lookup costs alone
                self._known[key] = known_costs(known_by, lambda: with_drafting(passes, self._base, heads))
        return self._known[key]

    def fixed(
        self, name: str, batch: int, rule: BuiltRule, start: StartSteps, build: Callable[[int], Drafter]
    ) -> Drafter:
        """The drafter of that name with the size that is best for the next completions.

        Args:
            name: Of the drafter.
            batch: Sequences B.
            rule: Decides in every step.
            start: What runs the steps.
            build: The drafter of a tree size; 1 = plain decoding.
        """
        slots = _bucket(batch)
        key = (name, rule.work, slots)
        if key not in self._fixed:
            known_by = facts(self._base, self._heads, slots, f"{name}, {start.__qualname__}", rule.work)
            costs = known_costs(
                known_by, lambda: measure_fixed(self._base, slots, start, lambda n: _whole(build(n)), rule)
            )
            self._fixed[key] = FixedSize(costs, cache(self._expected))  # it is asked for with every completion
        size = self._fixed[key]
        nodes = size.choose()
        self._tell(f"nodes auto: {nodes} for {name}, batch of {batch}; {size.costs}")
        drafter = build(nodes)
        if nodes > 1:
            # With the drafter itself: as long as it lives no other one has its id.
            self._watched[id(drafter), rule.work, slots] = size, nodes, drafter
            self._watched.move_to_end((id(drafter), rule.work, slots))
            while len(self._watched) > WATCHED:
                self._watched.popitem(last=False)
        return drafter

    def observe(self, drafter: Drafter, rule: BuiltRule, batch: int, output: Output) -> None:
        """Learn from a completion that is over."""
        watched = self._watched.get((id(drafter), rule.work, _bucket(batch)))
        if watched is not None:
            size, nodes, _ = watched  # the drafter may have fewer, where a base verifies chains only
            size.observe(nodes, [output])

    def _tell(self, reason: str) -> None:
        if reason != self.reason:
            logger.info("%s", reason)
        self.reason = reason

    def _expected(self, nodes: int) -> float:
        if self._calibration is not None:
            return grow_tree(self._calibration.accuracies, nodes).tokens_per_step
        depth = self._heads.config.num_heads if self._heads is not None else nodes
        return typical_tree(nodes, depth).tokens_per_step


def _whole(drafter: Drafter) -> Drafter:
    """A hybrid without its shortcut, which the zeros that costs are measured with would always take."""
    if isinstance(drafter, HybridDrafter) and drafter.shortcut is not None:
        return HybridDrafter(drafter.first, drafter.second)
    return drafter


def _bucket(batch: int) -> int:
    return 1 << (batch - 1).bit_length()
