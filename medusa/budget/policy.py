"""Which drafter and tree size is best here and now: the one that has brought the most tokens per second lately."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

SIZES = (1, 2, 4, 6, 8, 12, 16, 32, 64)
"""Nodes of a draft with the root; 1 is plain decoding, a size like the others."""
FIRST_WAIT, PLAIN_WAIT, LONGEST_WAIT = 12, 48, 512
"""Steps between two trials of another size: twice as many after each trial (exponential back-off), a quarter after one
that wins. More at first where plain decoding is best, since a trial costs most then."""
TRIAL = 8
"""Steps of a trial with one sequence; of a batch, steps of all its sequences together count."""
SHORTEST_TRIAL = 2
"""Steps of a trial with a large batch, or of plain decoding, which always brings one token per step."""
MEMORY = 256
"""Steps that speeds reach back, those of arms that were not taken too."""
RECENT = 15
"""Steps of an arm whose median says how long one takes usually."""
LATE = 2.0
"""A step that something else held up counts so many times the usual seconds at most."""
MARGIN = 1.1
"""Another arm must be so much faster, plain decoding aside: the luck of a few steps is not enough."""
DROP = 0.7
"""An arm that has become so much slower is compared at once."""


class Arm(NamedTuple):
    """A choice: who drafts, and at most how many nodes."""

    drafter: str
    nodes: int

    def __str__(self) -> str:
        """For logs and screens."""
        return "plain" if self == PLAIN else f"{self.drafter} {self.nodes}"


PLAIN = Arm("plain", 1)


class Policy:
    """Climbs to the drafter and tree size with the most tokens per second, and goes on trying others.

    Tried by turns are plain decoding, the next larger and the next smaller size, and the other drafters. So drafts that
    do not earn their time, of useless heads or in a full batch, give way to plain decoding, and estimates follow text
    and machine as they change.

    Several threads may observe: an observation that is lost does no harm.

    Args:
        drafters: By name the sizes that are tried, ascending and above 1; the first drafter is taken first. A drafter
            with one size says itself how much of it is worth a row.
        start: The first size; of those of the drafter the largest that is not larger, or plain decoding.
        batch: Sequences that share a step.
    """

    def __init__(self, drafters: Mapping[str, Sequence[int]], start: int, batch: int) -> None:
        self._drafters, self._start = dict(drafters), start
        self._speeds: dict[Arm, _Speed] = {}
        self.arm = self._home(next(iter(drafters)))
        self._steps = 0
        self._trial_steps = max(SHORTEST_TRIAL, TRIAL // batch)
        self._turns = 0
        self._trial: Arm | None = None
        self._left = self._wait = self._first_wait()
        self._usual = 0.0  # speed of the arm when it was last compared

    def choose(self) -> Arm:
        """The arm of the next step, or of the next completion."""
        return self._trial or self.arm

    def observe(self, arm: Arm, tokens: float, seconds: float, steps: int = 1) -> None:
        """Learn from steps of one arm.

        Args:
            arm: What was chosen.
            tokens: That the steps emitted, per sequence.
            seconds: How long they took.
            steps: How many steps.
        """
        if arm not in self._speeds:  # the first step of an arm allocates, compiles or records: it does not count
            self._speeds[arm] = _Speed()
            return
        self._steps += steps
        self._speeds[arm].add(tokens, seconds, steps, self._steps)
        if arm != self.choose():
            return
        self._left -= steps
        if self._trial is None and self._speeds[arm].tokens_per_second < DROP * self._usual:
            self._left = self._wait = self._turns = 0  # plain decoding first
        if self._left <= 0:
            self._take_turn()

    def __str__(self) -> str:
        """For logs and screens: the arm, and what is known of all in tokens per second of a sequence."""
        speeds = {arm: speed.tokens_per_second for arm, speed in sorted(self._speeds.items()) if speed.seconds}
        seen = ", ".join(f"{arm}: {speed:.3g}" for arm, speed in speeds.items())
        known = f" (tokens per second: {seen})" if seen else ""
        return f"{self.arm} now, others are tried as it runs{known}"

    def _take_turn(self) -> None:
        """Begin a trial, or end one: stay with the fastest arm."""
        if self._trial is None:
            self._trial = self._next()
            self._left = SHORTEST_TRIAL if self._trial == PLAIN else self._trial_steps
            return
        best = self._fastest()
        wait = self._wait // 4 if best != self.arm else min(2 * self._wait, LONGEST_WAIT)
        self.arm, self._trial = best, None
        self._left = self._wait = max(wait, self._first_wait())
        self._usual = self._speeds[best].tokens_per_second

    def _fastest(self) -> Arm:
        speeds = {arm: speed.tokens_per_second for arm, speed in self._speeds.items()}
        best = max(speeds, key=lambda arm: speeds[arm] * (MARGIN if arm == self.arm else 1.0))
        return PLAIN if speeds.get(PLAIN, 0.0) > speeds[best] else best

    def _first_wait(self) -> int:
        return FIRST_WAIT if self.arm != PLAIN else PLAIN_WAIT

    def _home(self, drafter: str) -> Arm:
        """Where a drafter begins, or was fastest."""
        known = {arm: speed.tokens_per_second for arm, speed in self._speeds.items() if arm.drafter == drafter}
        if known:
            return max(known, key=known.__getitem__)
        sizes = self._drafters[drafter]
        small = sizes if len(sizes) == 1 else [size for size in sizes if size <= self._start]
        return Arm(drafter, small[-1]) if small else PLAIN

    def _next(self) -> Arm:
        """The next one to try: plain decoding, a size beside this one, another drafter."""
        if self.arm == PLAIN:
            others = [Arm(drafter, sizes[0]) for drafter, sizes in self._drafters.items()]
        else:
            sizes = (1, *self._drafters[self.arm.drafter])
            place = sizes.index(self.arm.nodes)
            beside = sizes[place - 1 : place + 2 : 2]
            others = [PLAIN, *(Arm(self.arm.drafter, size) for size in beside if size > 1)]
            others += [self._home(drafter) for drafter in self._drafters if drafter != self.arm.drafter]
        others = [arm for arm in dict.fromkeys(others) if arm != self.arm]
        self._turns += 1
        return others[(self._turns - 1) % len(others)]


class _Speed:
    """Tokens per second of one arm, in which what is long ago counts less and less."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self._seen = 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, tokens: float, seconds: float, steps: int, now: int) -> None:
        """Observe steps, the last of which is the ``now``-th of all arms; what was seen before counts less."""
        self._recent.append(seconds / steps)
        if seconds > LATE * steps * min(self._recent):  # otherwise the median says no less
            seconds = min(seconds, LATE * steps * median(self._recent))
        keep, self._seen = (1 - 1 / MEMORY) ** (now - self._seen), now
        self.tokens, self.seconds = keep * self.tokens + tokens, keep * self.seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """0 before anything was seen."""
        return self.tokens / self.seconds if self.seconds else 0.0
