"""Input and output of the chat: a terminal with line editing, or plain pipes."""

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
"""Control characters that a model might write and that would control a terminal."""
_REMEMBERED = 1000
"""Most lines of history that a chat keeps for the next one."""


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 turn``, ``1,024 tokens``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Terminal:
    """Reads lines, and writes answers and notes.

    If both input and output are a terminal, everything is written to it, with dimmed and coloured text, and lines break
    between words. Otherwise only answers go to stdout, so that they can be piped; notes go to stderr, and no ANSI codes
    are written.
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
        """Whether drafted text is coloured, if ANSI codes are allowed."""
        moves = self.interactive and environ.get("TERM") != "dumb"
        self.ansi = moves and not environ.get("NO_COLOR")
        self._stdin = stdin
        self._answers = stdout
        self._notes = stdout if self.interactive else stderr
        self._wrapper = Wrapper(lambda: shutil.get_terminal_size().columns) if moves else None
        self._history = history
        """File with the typed lines of earlier chats; None = no file."""
        self._remembers = False

    def enable_line_editing(self, commands: Iterable[str], words: Iterable[str]) -> None:
        """Use GNU readline if it is available: arrow keys, history, multi-line paste, and completion with Tab.

        Args:
            commands: Words that Tab completes at the start of a line.
            words: Words that Tab completes after a command.
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
        """Read one line, without its line end.

        Args:
            prompt: Prompt text, shown only in a terminal.

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
            import readline

            with suppress(OSError):
                readline.append_history_file(1, self._history)
        return line

    @contextmanager
    def unechoed(self) -> Iterator[None]:
        """A context in which typed keys are not shown; the next line begins with them."""
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
        """Write a piece of an answer at once; ``drafted`` marks text from accepted drafts."""
        if self.interactive:
            text = text.translate(_UNSAFE)
        self._write(self._answers, text, _GREEN if drafted and self.colour else "")

    def thought(self, text: str) -> None:
        """Write a piece of the model's reasoning, which is not part of the answer."""
        self._write(self._notes, text.translate(_UNSAFE), _DIM)

    def note(self, text: str) -> None:
        """Write a note, a line that is not part of an answer."""
        self._write(self._notes, text, _DIM, end="\n")

    def error(self, text: str) -> None:
        """Write an error message."""
        self._write(self._notes, f"error: {text}", _RED, end="\n")

    def _write(self, stream: TextIO, text: str, style: str, end: str = "") -> None:
        runs = [(text, style), (end, "")] if self._wrapper is None else []
        if self._wrapper is not None:
            runs = self._wrapper.feed(text, style) + self._wrapper.feed(end)
        stream.write("".join(f"{style}{run}{_RESET}" if style and self.ansi else run for run, style in runs))
        stream.flush()
