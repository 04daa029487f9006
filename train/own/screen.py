"""Progress on the screen: one line for each stage."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_SECONDS = 30.0
"""Seconds between two lines without a terminal."""
Tell = Callable[[float, str], None]
"""Called with (share that is done, description)."""


def clock(seconds: float) -> str:
    """A duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Screen:
    """Shows the progress of stages.

    Args:
        console: a terminal, which shows bars, or a file, which gets a line now and then.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, seconds: float) -> Iterator[Tell]:
        """A stage that takes about `seconds`; yields a function to call with the progress."""
        began = last = time.monotonic()

        def line(done: float, what: str) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                self.say(f"{name:<10} {done:4.0%}  {clock(last - began)} of about {clock(seconds)}  {what}")

        if not self.console.is_terminal:
            yield line
            self.say(f"{name:<10} done  {clock(time.monotonic() - began)}")
            return
        about = TextColumn(f"of about {clock(seconds)}  {{task.fields[what]}}")
        columns = TextColumn(f"{name:<10}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn(), about
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(name, total=1.0, what="")
            yield lambda done, what: progress.update(task, completed=done, what=what)
            progress.update(task, completed=1.0)
