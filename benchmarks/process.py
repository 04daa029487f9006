"""Programs that are measured alternately: each has its own session, and is stopped while another one works."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

STOP_SECONDS = 10.0
"""Seconds until a program that was asked to end is killed."""
ORDERED = {"PYTHONUNBUFFERED": "1"}
"""What a program said before it was killed is in its log, in the order in which it said it."""
LAST_WORDS = 8
"""Last lines of the log in an error message."""


class Process:
    """A program that runs until it is closed.

    Args:
        name: Name for errors.
        words: The command.
        log: File for its messages.
        environment: Additional environment variables.
        directory: Working directory; None = the current one.
        piped: Input and output are pipes; otherwise it has no input, and its output goes to the log too.

    Attributes:
        pipes: Input and output, if it is piped.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        directory: Path | None = None,
        piped: bool = False,
    ) -> None:
        self.name, self._log = name, log
        with log.open("w", encoding="utf-8") as said:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else said, stderr=said, text=True, start_new_session=True,
                env={**os.environ, **ORDERED, **environment}, cwd=directory,
            )  # fmt: skip

        self.pipes = cast(tuple[IO[str], IO[str]], (self._process.stdin, self._process.stdout))

    @property
    def runs(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; returns the exit status, or None if it still runs after this number of seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def resume(self) -> None:
        """Continue the program."""
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        """Stop the program, so that it uses no cores."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the program and all processes that it has started."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        self.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in filter(None, self.pipes):
            with suppress(OSError):  # unread output
                pipe.close()

    def failure(self, how: str = "ended") -> RuntimeError:
        """An error with the last lines of its log."""
        return RuntimeError(f"{self.name} {how}; {self._log} says:\n" + "\n".join(last_words(self._log)))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all its processes have ended
            os.killpg(self._process.pid, number)


def last_words(log: Path) -> list[str]:
    """The last lines of a log."""
    return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_WORDS:]
