"""The face of the chat: a terminal with line editing, or plain pipes."""

import os
from collections.abc import Iterable, Mapping
from typing import TextIO

_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_RED = "\x1b[31m"
_GREEN = "\x1b[32m"

_UNSAFE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters that a model might write and a terminal would obey."""


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 turn``, ``1,024 tokens``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Terminal:
    """Reads lines, writes answers and notes.

    With a terminal on both ends everything goes to it, dimmed or coloured where that helps. Otherwise answers alone go
    to stdout, so that they can be piped on; notes go to stderr, and no ANSI code is written.
    """

    def __init__(
        self,
        stdin: TextIO,
        stdout: TextIO,
        stderr: TextIO,
        colour: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.interactive = stdin.isatty() and stdout.isatty()
        self.colour = colour
        """Whether drafted text is coloured, where ANSI codes are allowed at all."""
        self.ansi = self.interactive and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._stdin = stdin
        self._answers = stdout
        self._notes = stdout if self.interactive else stderr

    def enable_line_editing(self, words: Iterable[str]) -> None:
        """Use GNU readline if it is there: arrow keys, a history in memory, Tab for ``words``, multi-line paste."""
        if not self.interactive:
            return
        try:
            import readline
        except ImportError:
            return
        if "libedit" in (readline.__doc__ or ""):
            return
        choices = sorted(words)

        def complete(text: str, state: int) -> str | None:
            matches = [word for word in choices if text and word.startswith(text)]
            return matches[state] + " " if state < len(matches) else None

        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self, prompt: str) -> str:
        """One line without its end.

        Args:
            prompt: Shown in a terminal only.

        Raises:
            EOFError: At the end of the input.
            KeyboardInterrupt: At Ctrl-C.
        """
        if not self.interactive:
            line = self._stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            self.answer("\n")
            raise

    def answer(self, text: str, drafted: bool = False) -> None:
        """Write a piece of an answer at once; ``drafted`` marks text that the heads guessed."""
        if self.interactive:
            text = text.translate(_UNSAFE)
        self._write(self._answers, text, _GREEN if drafted and self.colour else "")

    def note(self, text: str) -> None:
        """Write a line about the chat, not of it."""
        self._write(self._notes, text, _DIM, end="\n")

    def error(self, text: str) -> None:
        """Write a line about something that went wrong."""
        self._write(self._notes, f"error: {text}", _RED, end="\n")

    def _write(self, stream: TextIO, text: str, style: str, end: str = "") -> None:
        stream.write(f"{style}{text}{_RESET}{end}" if style and self.ansi else text + end)
        stream.flush()
