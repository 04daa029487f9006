"""Tree sizes that nobody has to give (``nodes=None``): those that bring the most tokens per second as it runs."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from medusa.acceptance import BuiltRule
from medusa.budget.policy import SIZES, SizePolicy
from medusa.drafters.base import Drafter
from medusa.engine.output import Output
from medusa.state import DecodeState
from medusa.tree import Draft

logger = logging.getLogger(__name__)

Build = Callable[[int], Drafter]
"""The drafter of a tree size; 1 = plain decoding."""
ROWS = {"cpu": 8, "cuda": 32}
"""Rows of a pass that cost little more than one, before anything was seen: the first size is so many for a batch."""
WATCHED = 64
"""Drafters whose completions are learned from, the latest ones."""


class AutoDrafter(Drafter):
    """Drafts of the size that is best at each step, where shapes cost nothing (a CPU).

    For one completion, or one batch of them, at a time; those that share a policy share what is learned.

    Args:
        policy: Chooses the size.
        build: The drafter of a tree size.
        nodes: Of the largest one.
        clock: Tells how long steps take, in seconds.
    """

    def __init__(
        self, policy: SizePolicy, build: Build, nodes: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.nodes = nodes
        self._policy, self._build, self._clock = policy, build, clock
        self._last: tuple[DecodeState, int, float] | None = None

    def propose(self, state: DecodeState) -> Draft:
        """A draft below ``state.roots``."""
        now = self._clock()
        self._learn(state, now)
        nodes = self._policy.choose()
        self._last = state, nodes, now
        return self._build(nodes).propose(state)

    def _learn(self, state: DecodeState, now: float) -> None:
        """See what the last step has brought. When rows join or leave, or the cache grows, it is not judged."""
        if self._last is None or self._last[0].history is not state.history:
            return
        before, nodes, began = self._last
        new = [count for count in (state.positions - before.positions).tolist() if count]
        if new:
            self._policy.observe(nodes, sum(new) / len(new), now - began)


class AutoNodes:
    """A policy for each way of drafting, size of batch, and what the rule computes.

    Batches count as the next power of two.

    Args:
        device_type: Where the base computes.

    Attributes:
        reason: The last choice and why, in one line.
    """

    def __init__(self, device_type: str) -> None:
        self._rows = ROWS.get(device_type, ROWS["cpu"])
        self._policies: dict[tuple[str, str, int], SizePolicy] = {}
        self._watched: OrderedDict[tuple[int, str, int], tuple[SizePolicy, int, Drafter]] = OrderedDict()
        self.reason = ""

    def at_each_step(self, name: str, batch: int, rule: BuiltRule, build: Build) -> Drafter:
        """A drafter for the next completions that chooses its size at each step, where shapes cost nothing.

        Args:
            name: Of the drafter.
            batch: Sequences B.
            rule: Decides in every step.
            build: The drafter of a tree size.
        """
        return AutoDrafter(self._policy(name, batch, rule), build, SIZES[-1])

    def for_completion(self, name: str, batch: int, rule: BuiltRule, build: Build) -> Drafter:
        """The drafter of the size that is best for the next completions, where shapes are fixed; see above."""
        policy = self._policy(name, batch, rule)
        drafter = build(nodes := policy.choose())
        # With the drafter itself: as long as it lives no other one has its id.
        key = (id(drafter), rule.work, _bucket(batch))
        self._watched[key] = policy, nodes, drafter
        self._watched.move_to_end(key)
        while len(self._watched) > WATCHED:
            self._watched.popitem(last=False)
        return drafter

    def observe(self, drafter: Drafter, rule: BuiltRule, batch: int, output: Output) -> None:
        """Learn from a completion that is over."""
        watched = self._watched.get((id(drafter), rule.work, _bucket(batch)))
        if watched is not None and output.steps:
            policy, nodes, _ = watched  # the drafter may have fewer, where a base verifies chains only
            policy.observe(nodes, len(output.tokens), output.seconds, output.steps)

    def _policy(self, name: str, batch: int, rule: BuiltRule) -> SizePolicy:
        key = (name, rule.work, slots := _bucket(batch))
        if key not in self._policies:
            self._policies[key] = SizePolicy(self._rows // slots, slots)
        reason = f"nodes auto for {name}, batch of {batch}: {self._policies[key]}"
        if reason != self.reason:
            logger.info("%s", reason)
        self.reason = reason
        return self._policies[key]


def _bucket(batch: int) -> int:
    return 1 << (batch - 1).bit_length()
