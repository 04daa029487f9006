"""A run that is asked to end: SIGTERM as schedulers send it before they kill, SIGUSR1 as SLURM sends it ahead of time.

While a run is set up there is nothing to keep, and it ends at once. While it trains, a signal is only noted: the
processes agree on it with the figures of a step and write a checkpoint first.
"""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Item = TypeVar("Item")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """The run ends because a signal asked for it; like KeyboardInterrupt no error, so that nothing handles it as one.

    Args:
        number: the signal.
        where: where the run stands.
    """

    def __init__(self, number: int, where: str = "before training began") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {where}; the same command continues")
        self.number = number


class StopRequest:
    """What this process was asked for, and what all processes agreed on.

    Attributes:
        number: the signal that arrived here, 0 = none.
        agreed: some process was asked to stop, and all know it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.agreed = False
        self._held = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals; until `hold` they raise `Stopped`."""
        before = {number: signal.signal(number, self._arrived) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        """Only note a signal from now on, since the processes have to end together."""
        self._held = True

    def unless_asked(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items up to the signal: for long work whose result is not needed after it."""
        for item in items:
            if self.number:
                return
            yield item

    def raise_if_agreed(self, step: int) -> None:
        """End the run, on all processes.

        Raises:
            Stopped: some process was asked to.
        """
        if self.agreed:
            raise Stopped(self.number or signal.SIGTERM, f"at step {step}")

    def _arrived(self, number: int, _: FrameType | None) -> None:
        self.number = number
        if not self._held:
            raise Stopped(number)
