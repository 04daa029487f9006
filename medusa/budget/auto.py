"""A drafter that is chosen anew at each step, where shapes cost nothing."""

from collections.abc import Callable, Sequence

from medusa.budget.policy import PLAIN, Arm, Policy
from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft


class AutoDrafter(Drafter):
    """Drafts as is best at each step (on a CPU).

    For one completion, or one batch of them, at a time; those that share a policy share what is learned.

    Args:
        policy: Chooses the drafter and the size of its trees.
        build: The drafter of an arm.
        largest: The largest arm of each drafter.
    """

    def __init__(self, policy: Policy, build: Callable[[Arm], Drafter], largest: Sequence[Arm]) -> None:
        drafters = [build(arm) for arm in largest]
        self.nodes = max(drafter.nodes for drafter in drafters)
        self._policy, self._build = policy, build
        self._arm = policy.choose()
        self._drafter = build(self._arm)

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A draft below ``state.roots``."""
        arm = self._policy.choose()
        if arm != self._arm:
            self._arm, self._drafter = arm, self._build(arm)
        return self._drafter.propose(state, cached)

    def beside_prompts(self) -> Drafter:
        """Nobody: first tokens come sooner."""
        return self._build(PLAIN)

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """Let the policy learn."""
        new = [count for count in counts if count]
        if new:
            self._policy.observe(self._arm, sum(new) / len(new), seconds)
