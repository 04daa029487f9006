"""Which drafter and tree size is best here and now: the one that has brought the most tokens per second lately."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

SIZES = (2, 4, 8, 16, 32, 64)
"""Nodes of a draft with the root."""
FIRST_WAIT, PLAIN_WAIT, LONGEST_WAIT = 12, 48, 512
"""Steps between two trials of another arm: twice as many while the best one stays (exponential back-off). More at first
where plain decoding is best, since a trial costs most then."""
TRIAL, SHORTEST_TRIAL = 8, 2
"""Steps of a trial: of a batch, steps of all its sequences together count; plain decoding, which always brings one
token per step, needs the fewest."""
MEMORY = 256
"""Steps that speeds reach back, those of arms that were not taken too."""
RECENT = 15
"""Steps of an arm whose median says how long one takes usually."""
LATE = 2.0
"""A step that something else held up counts so many times the usual seconds at most."""
MARGIN = 1.05
"""Another arm must be so much faster than this one and than plain decoding: the luck of a few steps is not enough."""


class Arm(NamedTuple):
    """A choice: a drafter, and the most nodes of its trees."""

    drafter: str
    nodes: int

    def __str__(self) -> str:
        """For logs and screens."""
        return "plain" if self == PLAIN else f"{self.drafter} {self.nodes}"


PLAIN = Arm("plain", 1)


class Policy:
    """Climbs to the drafter and tree size with the most tokens per second, and goes on trying others.

    Drafts that do not earn their time, of useless heads or in a full batch, give way to plain decoding, and estimates
    follow text and machine as they change. Several threads may observe: an observation that is lost does no harm.

    Args:
        drafters: By name the sizes that are tried, ascending; the first drafter is taken first. A drafter with one
            size says itself how much of it is worth a row.
        start: The first size: of those of a drafter the largest that is not larger, or the smallest; 0 = begin plainly.
        batch: Sequences that share a step.

    Attributes:
        arm: The best one, as far as is known.
    """

    def __init__(self, drafters: Mapping[str, Sequence[int]], start: int, batch: int) -> None:
        self._ladders = [[Arm(name, size) for size in sizes] for name, sizes in drafters.items()]
        self._start, self._trial_steps = start, max(SHORTEST_TRIAL, TRIAL // batch)
        self._speeds: dict[Arm, _Speed] = {}
        self.arm = self._best(self._ladders[0]) if start else PLAIN
        self._trial: Arm | None = None
        self._steps = self._turns = 0
        self._left = self._wait = self._first_wait()

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
        if arm == self.choose():
            self._left -= steps
            if self._left <= 0:
                self._take_turn()

    def __str__(self) -> str:
        """For logs and screens: the arm, and what is known of all in tokens per second of a sequence."""
        seen = ", ".join(f"{arm}: {speed:.3g}" for arm in sorted(self._speeds) if (speed := self._speed(arm)))
        known = f" (tokens per second: {seen})" if seen else ""
        return f"{self.arm} now, others are tried as it runs{known}"

    def _take_turn(self) -> None:
        """Begin a trial, or end one: stay with the fastest arm."""
        if self._trial is None:
            self._trial = self._next()
            self._left = SHORTEST_TRIAL if self._trial == PLAIN else self._trial_steps
            return
        best = max(self._speeds, key=lambda arm: self._speed(arm) * (MARGIN if arm in (PLAIN, self.arm) else 1.0))
        doubled = min(2 * self._wait, LONGEST_WAIT) if best == self.arm else 0
        self.arm, self._trial = best, None
        self._left = self._wait = max(doubled, self._first_wait())

    def _first_wait(self) -> int:
        return PLAIN_WAIT if self.arm == PLAIN else FIRST_WAIT

    def _next(self) -> Arm:
        """By turns plain decoding, the sizes beside this one, and the other drafters."""
        others = [PLAIN]
        for ladder in self._ladders:
            if self.arm == PLAIN:
                others.append(ladder[0])
            elif self.arm in ladder:
                place = ladder.index(self.arm)
                others += ladder[max(0, place - 1) : place + 2]
            else:
                others.append(self._best(ladder))
        others.remove(self.arm)
        self._turns += 1
        return others[(self._turns - 1) % len(others)]

    def _best(self, ladder: Sequence[Arm]) -> Arm:
        """Where a drafter was fastest, or begins."""
        begins = max((arm for arm in ladder if arm.nodes <= self._start), default=ladder[0])
        return max(ladder, key=lambda arm: (self._speed(arm), arm == begins))

    def _speed(self, arm: Arm) -> float:
        """Tokens per second; 0 before anything was seen."""
        speed = self._speeds.get(arm)
        return speed.tokens / speed.seconds if speed and speed.seconds else 0.0


class _Speed:
    """Tokens and seconds of one arm, in which what is long ago counts less and less."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self._seen = 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, tokens: float, seconds: float, steps: int, now: int) -> None:
        """Observe steps, the last of which is the ``now``-th of all arms."""
        self._recent.append(seconds / steps)
        seconds = min(seconds, LATE * steps * median(self._recent))
        keep, self._seen = (1 - 1 / MEMORY) ** (now - self._seen), now
        self.tokens, self.seconds = keep * self.tokens + tokens, keep * self.seconds + seconds
