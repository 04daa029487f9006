"""Progress of a run: a bar on a terminal, or log lines."""

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

LOGGER = logging.getLogger("medusa.train")
LINE_SECONDS = 10.0
"""Seconds between two log lines without a terminal."""


class Progress:
    """Shows the figures of each step on process 0: a bar on a terminal, otherwise a line now and then.

    Args:
        start: completed steps.
        total: steps of the whole run.
        shown: False on the other processes.
    """

    def __init__(self, start: int, total: int, shown: bool) -> None:
        self._total = total
        self._start = start
        self._began = self._last_line = time.monotonic()
        self._shown = shown
        self._bar = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    def update(self, step: int, figures: Mapping[str, Any]) -> None:
        """Show the figures of the step that was just completed."""
        heads = " ".join(f"{share:.2f}" for share in figures["head_top1"])
        text = f"loss {figures['loss']:.3f}  top-1 {heads}  {figures['useful_tokens_per_s']:,.0f} tok/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._shown and (step == self._total or time.monotonic() - self._last_line >= LINE_SECONDS):
            self._last_line = time.monotonic()
            seconds = (self._last_line - self._began) / (step - self._start) * (self._total - step)
            LOGGER.info("step %d/%d  %s  ETA %d:%02d", step, self._total, text, *divmod(round(seconds), 60))

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
