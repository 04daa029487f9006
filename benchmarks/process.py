"""Programs that are measured in turn: each in a session of its own, and stopped while another one is asked."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

STOP_SECONDS = 10.0
"""Patience with a program that is asked to end."""
LAST_WORDS = 8
"""Lines of its log that an error repeats."""


class Process:
    """A program that runs until it is closed.

    Args:
        name: What errors call it.
        words: Its command.
        log: File that gets what it says.
        environment: Variables beside this process's own.
        directory: Where it runs; None = here.
        piped: It has an input and an output; otherwise it has no input, and its output goes to the log too.

    Attributes:
        pipes: Input and output, where it is piped.
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
                env=os.environ | environment, cwd=directory,
            )  # fmt: skip

        self.pipes = cast(tuple[IO[str], IO[str]], (self._process.stdin, self._process.stdout))

    @property
    def pid(self) -> int:
        """The process that leads its session."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None where it still runs after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def resume(self) -> None:
        """Let it work."""
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        """Take its cores away."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it and what it has started."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        self.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in filter(None, self.pipes):
            with suppress(OSError):  # what was not read
                pipe.close()

    def failure(self, how: str = "ended") -> RuntimeError:
        """An error that repeats its last words."""
        return RuntimeError(f"{self.name} {how}; {self._log} says:\n" + "\n".join(last_words(self._log)))

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, and all that it has started
            os.killpg(self._process.pid, number)


def last_words(log: Path) -> list[str]:
    """The last lines of a log."""
    return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_WORDS:]
