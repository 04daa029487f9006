"""Which tree size is best here and now: the one that has brought the most tokens per second lately."""

SIZES = (1, 2, 4, 8, 12, 16, 32, 64)
"""Nodes of a draft with the root; 1 is plain decoding, a size like the others."""
FIRST_WAIT, PLAIN_WAIT, LONGEST_WAIT = 12, 48, 512
"""Steps between two trials of another size: twice as many after each trial (exponential back-off), a quarter after one
that wins. More at first where plain decoding is best, since a trial costs most then."""
TRIAL = 8
"""Steps of a trial with one sequence; of a batch, steps of all its sequences together count."""
SHORTEST_TRIAL = 2
"""Steps of a trial with a large batch, or of plain decoding, which always brings one token per step."""
MEMORY = 256
"""Steps that speeds reach back, those of sizes that were not taken too."""
MARGIN = 1.1
"""Another size must be so much faster, plain decoding aside: the luck of a few steps is not enough."""
DROP = 0.7
"""A size that has become so much slower is compared at once."""
LATE = 3.0
"""A step that something else held up counts so many times its usual seconds at most."""


class SizePolicy:
    """Climbs to the tree size with the most tokens per second, and goes on trying others.

    Tried are plain decoding, the next larger and the next smaller size. So drafts that do not earn their time, of
    useless heads or in a full batch, give way to plain decoding, and estimates follow text and machine as they change.

    Several threads may observe: an observation that is lost does no harm.

    Args:
        start: The first size; of ``SIZES`` the largest that is not larger.
        batch: Sequences that share a step.
    """

    def __init__(self, start: int, batch: int) -> None:
        self.size = max(size for size in SIZES if size <= max(1, start))
        self._trial_steps = max(SHORTEST_TRIAL, TRIAL // batch)
        self._speeds: dict[int, _Speed] = {}
        self._turns, self._trial = 0, 0  # 0: no trial
        self._left = self._wait = self._first_wait()
        self._usual = 0.0  # speed of the size when it was last compared

    def choose(self) -> int:
        """The size for the next step, or the next completion."""
        return self._trial or self.size

    def observe(self, nodes: int, tokens: float, seconds: float, steps: int = 1) -> None:
        """Learn from steps of one size.

        Args:
            nodes: What was chosen.
            tokens: That the steps emitted, per sequence.
            seconds: How long they took.
            steps: How many steps.
        """
        if nodes not in self._speeds:  # the first step of a size allocates, compiles or records: it does not count
            self._speeds[nodes] = _Speed()
            return
        for speed in self._speeds.values():
            speed.fade((1 - 1 / MEMORY) ** steps)
        self._speeds[nodes].add(tokens, seconds, steps)
        if nodes != self.choose():
            return
        self._left -= steps
        if self._trial == 0 and self._speeds[nodes].tokens_per_second < DROP * self._usual:
            self._left = self._wait = 0
        if self._left <= 0:
            self._take_turn()

    def __str__(self) -> str:
        """For logs and screens: the size, and what is known of sizes in tokens per second of a sequence."""
        speeds = {size: speed.tokens_per_second for size, speed in sorted(self._speeds.items()) if speed.seconds > 0}
        seen = ", ".join(f"{size}: {speed:.3g}" for size, speed in speeds.items())
        known = f" (tokens per second by size: {seen})" if seen else ""
        return f"{self.size} now, others are tried as it runs{known}"

    def _take_turn(self) -> None:
        """Begin a trial, or end one: stay with the fastest size."""
        if self._trial == 0:
            self._trial = self._next()
            self._left = SHORTEST_TRIAL if self._trial == 1 else self._trial_steps
            return
        best = self._fastest()
        wait = self._wait // 4 if best != self.size else min(2 * self._wait, LONGEST_WAIT)
        self.size, self._trial = best, 0
        self._left = self._wait = max(wait, self._first_wait())
        self._usual = self._speeds[best].tokens_per_second

    def _fastest(self) -> int:
        speeds = {size: speed.tokens_per_second for size, speed in self._speeds.items()}
        best = max(speeds, key=lambda size: speeds[size] * (MARGIN if size == self.size else 1.0))
        return 1 if speeds.get(1, 0.0) > speeds[best] else best

    def _first_wait(self) -> int:
        return FIRST_WAIT if self.size > 1 else PLAIN_WAIT

    def _next(self) -> int:
        """Plain decoding, the next larger and the next smaller size by turns."""
        place = SIZES.index(self.size)
        others = {1, SIZES[min(place + 1, len(SIZES) - 1)], SIZES[max(place - 1, 0)]} - {self.size}
        self._turns += 1
        return sorted(others)[(self._turns - 1) % len(others)]


class _Speed:
    """Tokens per second of one size, in which what is long ago counts less and less."""

    def __init__(self) -> None:
        self.tokens = self.seconds = self.steps = 0.0

    def fade(self, keep: float) -> None:
        """Let what was seen count less."""
        self.tokens, self.seconds, self.steps = keep * self.tokens, keep * self.seconds, keep * self.steps

    def add(self, tokens: float, seconds: float, steps: int) -> None:
        """Observe steps."""
        if self.steps:
            seconds = min(seconds, LATE * steps * self.seconds / self.steps)
        self.tokens, self.seconds, self.steps = self.tokens + tokens, self.seconds + seconds, self.steps + steps

    @property
    def tokens_per_second(self) -> float:
        """0 before anything was seen."""
        return self.tokens / self.seconds if self.seconds else 0.0
