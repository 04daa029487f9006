"""Commands that run other commands: a child process gets the signals of its parent, and does not outlive it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are forwarded."""


@contextmanager
def started(words: Sequence[str], **how: Any) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a command and forward signals to it; wait for its end inside the context.

    Args:
        words: The command.
        how: Further arguments of ``Popen``.

    Yields:
        The child, and the signals that arrived.
    """
    received: list[int] = []
    child = subprocess.Popen(
        words,
        start_new_session=True,  # so that Ctrl-C reaches it once, from here
        preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call takes no lock
        **how,
    )

    def arrived(number: int, _: FrameType | None) -> None:
        received.append(number)
        if child.poll() is None:
            os.kill(child.pid, number)

    before = {number: signal.signal(number, arrived) for number in SIGNALS}
    try:
        yield child, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Let the end of the parent end this process too (Linux): an orphan would keep writing files."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in sys/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
