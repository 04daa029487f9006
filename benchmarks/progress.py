"""Progress of a long comparison: a bar on a terminal, otherwise lines."""

import sys
import threading
import time
from typing import Self

from tqdm import tqdm


class Progress:
    """Shows the current stage, the number of finished calls and the time on stderr.

    Args:
        total: Number of calls of all stages.
        bar_seconds: Interval of updates of the bar's clock, also within a call, which may compile for minutes.
        line_seconds: Longest time without a line if there is no terminal.
    """

    def __init__(self, total: int, bar_seconds: float = 1.0, line_seconds: float = 15.0) -> None:
        self._total = total
        self._done, self._stage, self._began = 0, "", time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            layout = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
            self._bar = tqdm(total=total, bar_format=layout, dynamic_ncols=True)
        self._sign = line_seconds if self._bar is None else bar_seconds
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def stage(self, name: str) -> None:
        """Begin a stage."""
        self._stage = name
        if self._bar is not None:
            self._bar.set_description_str(name)
        else:
            self._line()

    def update(self) -> None:
        """Count a finished call."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def _tick(self) -> None:
        while not self._ended.wait(self._sign):
            if self._bar is None:
                self._line()
            else:
                self._bar.refresh()

    def _line(self) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        sys.stderr.write(f"{minutes:02d}:{seconds:02d}  {self._done}/{self._total}  {self._stage}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._clock.join()
        if self._bar is not None:
            self._bar.close()
