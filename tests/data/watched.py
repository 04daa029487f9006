"""An answerer that is looked at from outside, and what was written of its answers."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[Any]:
    """Records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Watched:
    """Answers as another one does.

    Args:
        answerer: The other one.
        stop_after: Answers until Ctrl-C; None = it never comes.

    Attributes:
        asked: Numbers of the prompts that it was given.
    """

    def __init__(self, answerer: Any, stop_after: int | None = None) -> None:
        self._answerer, self._stop_after = answerer, stop_after
        self.asked: list[int] = []

    def answer(self, prompts: Sequence[Any]) -> Iterator[Any]:
        """What the other one answers, until it is stopped."""
        self.asked = [number for number, _ in prompts]
        with closing(self._answerer.answer(prompts)) as answers:
            yield from islice(answers, self._stop_after)
            if self._stop_after is not None:
                raise KeyboardInterrupt
