"""The face of the chat: a terminal with line editing, or plain pipes."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from medusa.serve.chat.wrap import Wrapper

_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_RED = "\x1b[31m"
_GREEN = "\x1b[32m"

_UNSAFE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters that a model might write and a terminal would obey."""
_REMEMBERED = 1000
"""Lines of the history that a chat begins with."""


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 turn``, ``1,024 tokens``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Terminal:
    """Reads lines, writes answers and notes.

    With a terminal on both ends everything goes to it, dimmed or coloured where that helps, and lines break between
    words. Otherwise answers alone go to stdout, so that they can be piped on; notes go to stderr, and no ANSI code is
    written.
    """

    def __init__(
        self,
        stdin: TextIO,
        stdout: TextIO,
        stderr: TextIO,
        colour: bool = False,
        environ: Mapping[str, str] = os.environ,
        history: Path | None = None,
    ) -> None:
        self.interactive = stdin.isatty() and stdout.isatty()
        self.colour = colour
        """Whether drafted text is coloured, where ANSI codes are allowed at all."""
        moves = self.interactive and environ.get("TERM") != "dumb"
        self.ansi = moves and not environ.get("NO_COLOR")
        self._stdin = stdin
        self._answers = stdout
        self._notes = stdout if self.interactive else stderr
        self._wrapper = Wrapper(lambda: shutil.get_terminal_size().columns) if moves else None
        self._history = history
        """A file of the lines that were typed, from one chat to the next."""
        self._remembers = False

    def enable_line_editing(self, commands: Iterable[str], words: Iterable[str]) -> None:
        """Use GNU readline if it is there: arrow keys, the history, multi-line paste, and Tab.

        Args:
            commands: What Tab completes at the start of a line.
            words: And behind a command.
        """
        if not self.interactive:
            return
        try:
            import readline
        except ImportError:
            return
        if self._history is not None:
            with suppress(OSError):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._history.touch(0o600)
                self._remembers = True
                readline.read_history_file(self._history)
        if "libedit" in (readline.__doc__ or ""):
            return
        first, later = sorted(commands), sorted(words)

        def complete(text: str, state: int) -> str | None:
            begun = readline.get_line_buffer()[: readline.get_begidx()]
            choices = later if begun.startswith("/") else [] if begun else first
            matches = [word for word in choices if text and word.startswith(text)]
            return matches[state] + " " if state < len(matches) else None

        readline.set_history_length(_REMEMBERED)
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
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            self.answer("\n")
            raise
        if self._remembers and line:
            self._remember()
        return line

    def _remember(self) -> None:
        import readline

        with suppress(OSError):
            readline.append_history_file(1, self._history)

    @contextmanager
    def unechoed(self) -> Iterator[None]:
        """Keys that are pressed meanwhile do not appear; the next line begins with them."""
        if not self.interactive or os.name == "nt":
            yield
            return
        import termios

        before = termios.tcgetattr(self._stdin)
        termios.tcsetattr(self._stdin, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
        try:
            yield
        finally:
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, before)

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
        runs = [(text, style), (end, "")] if self._wrapper is None else []
        if self._wrapper is not None:
            runs = self._wrapper.feed(text, style) + self._wrapper.feed(end)
        stream.write("".join(f"{style}{run}{_RESET}" if style and self.ansi else run for run, style in runs))
        stream.flush()
