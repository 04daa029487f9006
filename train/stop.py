"""Requests to end a run: Ctrl-C; schedulers send SIGTERM before they kill it, SLURM sends SIGUSR1 ahead of time.

During set-up there is nothing to save, and the run ends at once. During training a signal is only noted: the processes
agree on it when they add up the figures of a step, and write a checkpoint first. A second Ctrl-C ends the run at once.
"""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Item = TypeVar("Item")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """A signal ends the run. Like KeyboardInterrupt it is not an Exception, so that nothing handles it as an error.

    Args:
        number: the signal.
        where: position of the run, for the message.
    """

    def __init__(self, number: int, where: str = "before training began") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {where}; the same command continues")
        self.number = number


class StopRequest:
    """Requests to end: the signal of this process, and whether all processes know of one.

    Attributes:
        number: the signal that arrived here, 0 = none.
        agreed: some process was asked to stop, and all processes know it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.agreed = False
        self._held = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; until `hold` they raise `Stopped`."""
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # as in the background
        before = {number: signal.signal(number, self._arrived) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        """From now on only note signals, because the processes must end together."""
        self._held = True

    def unless_asked(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items until a signal arrives; for long work whose result is not needed after one."""
        for item in items:
            if self.number:
                return
            yield item

    def raise_if_agreed(self, step: int) -> None:
        """End the run, on all processes.

        Raises:
            Stopped: some process was asked to stop.
        """
        if self.agreed:
            raise Stopped(self.number or signal.SIGTERM, f"at step {step}")

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and (self.number == number or not self._held):
            raise KeyboardInterrupt
        self.number = number
        if not self._held:
            raise Stopped(number)
