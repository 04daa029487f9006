"""Chooses drafter and tree size: those with the most tokens per second in recent steps."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

SIZES = (2, 4, 8, 16, 32, 64)
"""Tree sizes, the root included."""
FIRST_WAIT, PLAIN_WAIT, LONGEST_WAIT = 12, 48, 512
"""Steps between two trials of another arm; doubled while the best one stays (exponential back-off). The first wait is
longer if plain decoding is best, because a trial costs most then."""
TRIAL, SHORTEST_TRIAL = 8, 2
"""Steps of a trial; in a batch the steps of all its sequences count. Plain decoding needs the fewest, because it always
emits one token per step."""
MEMORY = 256
"""Number of steps over which speeds are averaged, steps of other arms included."""
RECENT = 15
"""Number of steps whose median is the usual time of a step."""
LATE = 2.0
"""A delayed step counts as at most this many times the usual seconds."""
MARGIN = 1.05
"""Another arm must be faster than this one and than plain decoding by this factor, to exclude chance."""


class Arm(NamedTuple):
    """A choice of a drafter and of the largest size of its trees."""

    drafter: str
    nodes: int

    def __str__(self) -> str:
        """For logs and screens."""
        return "plain" if self == PLAIN else f"{self.drafter} {self.nodes}"


PLAIN = Arm("plain", 1)


class Policy:
    """Finds the drafter and tree size with the most tokens per second, and keeps trying others.

    If drafts do not pay, because heads are useless or the batch is full, plain decoding is chosen. Estimates follow
    changes of text and machine. Several threads may observe: a lost observation does no harm.

    Args:
        drafters: For each name the sizes to try, ascending; the first drafter is tried first. A drafter with one size
            decides itself how many nodes it uses.
        start: The first size: the drafter's largest size up to this one, or its smallest; 0 = begin plainly.
        batch: Number of sequences that share a step.

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
            arm: The arm of the steps.
            tokens: Tokens that the steps emitted, per sequence.
            seconds: Time of the steps.
            steps: Number of steps.
        """
        if arm not in self._speeds:  # not counted: the first step of an arm allocates, compiles or records
            self._speeds[arm] = _Speed()
            return
        self._steps += steps
        self._speeds[arm].add(tokens, seconds, steps, self._steps)
        if arm == self.choose():
            self._left -= steps
            if self._left <= 0:
                self._take_turn()

    def __str__(self) -> str:
        """For logs and screens: the arm, and the known speeds in tokens per second of a sequence."""
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
        """The next arm to try: in turn plain decoding, the neighbouring sizes, and the other drafters."""
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
        """The fastest arm of a drafter, or its first one."""
        begins = max((arm for arm in ladder if arm.nodes <= self._start), default=ladder[0])
        return max(ladder, key=lambda arm: (self._speed(arm), arm == begins))

    def _speed(self, arm: Arm) -> float:
        """Tokens per second; 0 before the first step."""
        speed = self._speeds.get(arm)
        return speed.tokens / speed.seconds if speed and speed.seconds else 0.0


class _Speed:
    """Decaying sums of tokens and seconds of one arm."""

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
