"""What an answer consists of, and how it is read piece by piece, for whole answers and for streams."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from uuid import uuid4


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Reasoned(NamedTuple):
    """Text of the model's reasoning, before it answers."""

    text: str


class Called(NamedTuple):
    """A call begins."""

    id: str
    name: str


class Argued(NamedTuple):
    """The arguments of the latest call grow by a piece of JSON."""

    text: str


Event = Said | Reasoned | Called | Argued
State = Callable[[bool], Iterator[Event]]
"""Takes events from the front of the text that has not been read; True = no more text follows."""


class Reader(ABC):
    """Reads one answer.

    Attributes:
        called: Whether it has called a tool.
    """

    def __init__(self) -> None:
        self._rest, self.called = "", False
        self._state: State = self._begin

    def read(self, text: str, last: bool = False) -> list[Event]:
        """The events of a piece of text; a possible beginning of a tag is held back.

        Args:
            text: The piece.
            last: Whether it is the last piece.
        """
        self._rest += text
        found, before = list[Event](), None
        while before != (self._state, self._rest):
            before = self._state, self._rest
            found += [event for event in self._state(last) if isinstance(event, Called) or event.text]
        return found

    @abstractmethod
    def _begin(self, last: bool) -> Iterator[Event]:
        """The first ``State``."""

    def _nothing(self, _: bool) -> Iterator[Event]:
        """The last ``State``: what follows is left out."""
        self._rest = ""
        yield from ()

    def _call(self, name: str) -> Called:
        self.called = True
        return Called(f"call_{uuid4().hex[:24]}", name)

    def _take(self, size: int) -> str:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, where texts of a kind that follow each other are one."""
    found = list[Event]()
    for event in events:
        before = found[-1] if found else None
        if before is not None and not isinstance(event, Called) and type(before) is type(event):
            found[-1] = type(event)(before.text + event.text)
        else:
            found.append(event)
    return found


def held(text: str, tag: str) -> int:
    """Number of characters at the end of a text that may begin a tag."""
    return max((size for size in range(1, len(tag)) if text.endswith(tag[:size])), default=0)
