"""Commands that run other commands: a child process gets the signals of its parent, and the parent waits for it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def handing_on(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward signals to a child, which must have a session of its own so that Ctrl-C reaches it once, from here.

    Yields:
        The signals that arrived.
    """
    received: list[int] = []

    def arrived(number: int, _: FrameType | None) -> None:
        received.append(number)
        if child.poll() is None:
            os.kill(child.pid, number)

    before = {number: signal.signal(number, arrived) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
