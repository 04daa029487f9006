"""Drafters and tree sizes that nobody has to give: those that bring the most tokens per second as it runs."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from medusa.acceptance import BuiltRule
from medusa.budget.policy import PLAIN, Arm, Policy
from medusa.cache import CachedSequence
from medusa.drafters.base import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft

logger = logging.getLogger(__name__)

Build = Callable[[Arm], Drafter]
"""The drafter of an arm."""
WATCHED = 64
"""Drafters whose completions are learned from, the latest ones."""


class Completed(Protocol):
    """What a completion says about its drafter once it is over."""

    tokens: list[int]
    """All of them; the first was its prompt's."""
    steps: int
    seconds: float
    """From the first token to the last."""


class AutoDrafter(Drafter):
    """Drafts as is best at each step, where shapes cost nothing (a CPU).

    For one completion, or one batch of them, at a time; those that share a policy share what is learned.

    Args:
        policy: Chooses who drafts, and how much.
        build: The drafter of an arm.
        arms: The largest of each drafter.
    """

    def __init__(self, policy: Policy, build: Build, arms: Sequence[Arm]) -> None:
        largest = [build(arm) for arm in arms]
        self.nodes = max(drafter.nodes for drafter in largest)
        self._policy, self._build = policy, build
        self._arm = policy.choose()
        self._drafter = build(self._arm)

    def propose(self, state: DecodeState, sequences: Sequence[CachedSequence] = (), /) -> Draft:
        """A draft below ``state.roots``."""
        arm = self._policy.choose()
        if arm != self._arm:
            self._arm, self._drafter = arm, self._build(arm)
        return self._drafter.propose(state, sequences)

    def beside_prompts(self) -> Drafter:
        """Nobody: first tokens come sooner."""
        return self._build(PLAIN)

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """Let the policy learn."""
        new = [count for count in counts if count]
        if new:
            self._policy.observe(self._arm, sum(new) / len(new), seconds)


Choices = Mapping[str, Sequence[int]]
"""Drafters by name, and the sizes of each, see ``Policy``."""


class Auto:
    """A policy for each set of heads and drafters, size of batch, and what the rule computes.

    Batches count as the next power of two.

    Args:
        rows: Rows of a pass that cost little more than one, as a guess before anything was seen: the first size is so
            many for a batch.

    Attributes:
        reason: The last choice and why, in one line.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._policies: dict[tuple[str | None, tuple[str, ...], str, int], Policy] = {}
        self._watched: OrderedDict[tuple[int, str, int], tuple[Policy, Arm, Drafter]] = OrderedDict()
        self.reason = ""

    def at_each_step(
        self, choices: Choices, batch: int, rule: BuiltRule, build: Build, heads: str | None = None
    ) -> Drafter:
        """A drafter for the next completions that chooses at each step, where shapes cost nothing.

        Args:
            choices: What there is.
            batch: Sequences B.
            rule: Decides in every step.
            build: The drafter of an arm.
            heads: Name of the heads, where there are several.
        """
        largest = [Arm(name, sizes[-1]) for name, sizes in choices.items()]
        return AutoDrafter(self._policy(choices, batch, rule, heads), build, largest)

    def for_completion(
        self, choices: Choices, batch: int, rule: BuiltRule, build: Build, heads: str | None = None
    ) -> Drafter:
        """The drafter that is best for the next completions, where shapes are fixed; see above."""
        policy = self._policy(choices, batch, rule, heads)
        drafter = build(arm := policy.choose())
        # With the drafter itself: as long as it lives no other one has its id.
        key = (id(drafter), rule.work, _bucket(batch))
        self._watched[key] = policy, arm, drafter
        self._watched.move_to_end(key)
        while len(self._watched) > WATCHED:
            self._watched.popitem(last=False)
        return drafter

    def observe(self, drafter: Drafter, rule: BuiltRule, batch: int, output: Completed) -> None:
        """Learn from a completion that is over."""
        watched = self._watched.get((id(drafter), rule.work, _bucket(batch)))
        if watched is not None and output.steps > 1:
            policy, arm, _ = watched  # the drafter may have fewer nodes, where a base verifies chains only
            policy.observe(arm, len(output.tokens) - 1, output.seconds, output.steps - 1)  # the first was the prompt's

    def _policy(self, choices: Choices, batch: int, rule: BuiltRule, heads: str | None) -> Policy:
        key = (heads, tuple(choices), rule.work, slots := _bucket(batch))
        if key not in self._policies:
            self._policies[key] = Policy(choices, self._rows // slots, slots)
        reason = f"auto, batch of {batch}: {self._policies[key]}"
        if reason != self.reason:
            logger.info("%s", reason)
        self.reason = reason
        return self._policies[key]


def _bucket(batch: int) -> int:
    return 1 << (batch - 1).bit_length()
