"""A drafter that chooses drafter and tree size in each step, for devices with free shapes (CPUs)."""

from collections.abc import Callable, Sequence

from medusa.budget.policy import PLAIN, Arm, Policy
from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft


class AutoDrafter(Drafter):
    """Drafts with the best drafter and size in each step (on a CPU).

    Serves one completion, or one batch, at a time; drafters that share a policy share its measurements.

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
        """Plain decoding, so that first tokens come sooner."""
        return self._build(PLAIN)

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """Pass the step to the policy."""
        new = [count for count in counts if count]
        if new:
            self._policy.observe(self._arm, sum(new) / len(new), seconds)
