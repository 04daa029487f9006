"""Parses text and tool calls of a model piece by piece, for whole answers and for streams."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple
from uuid import uuid4

from medusa.serve.api.tools import BEGIN, END, Calls

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The usual beginning of a call up to its arguments; other calls are read when they are complete."""


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Called(NamedTuple):
    """A call begins."""

    id: str
    name: str


class Argued(NamedTuple):
    """The arguments of the latest call grow by a piece of JSON."""

    text: str


Event = Said | Called | Argued


class CallReader:
    """Reads one answer.

    Args:
        calls: The rules for tool calls of the request.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls, self._rest = calls, ""
        self._read = self._all if not calls.tools else self._named if calls.name else self._text
        self._depth, self._quoted, self._escaped = 0, False, False
        self.called = False

    def read(self, text: str, last: bool = False) -> list[Event]:
        """The events of a piece of text; a possible beginning of a call is held back.

        Args:
            text: The piece.
            last: Whether it is the last piece.
        """
        self._rest += text
        found, before = list[Event](), None
        while before != (self._read, self._rest):
            before = self._read, self._rest
            found += [event for event in self._read(last) if isinstance(event, Called) or event.text]
        return found

    def _all(self, _: bool) -> Iterator[Event]:
        yield Said(self._take(len(self._rest)))

    def _nothing(self, _: bool) -> Iterator[Event]:
        self._rest = ""
        yield from ()

    def _named(self, _: bool) -> Iterator[Event]:
        """The whole answer as arguments of the named function."""
        if not self.called:
            yield self._call(self._calls.name)
        yield Argued(self._take(len(self._rest)))

    def _text(self, last: bool) -> Iterator[Event]:
        """Text before a call; white space right before a call is dropped."""
        said, tag, _ = self._rest.partition(BEGIN)
        if tag:
            yield Said(said.rstrip())
            self._take(len(said) + len(tag))
            self._read = self._head
            return
        if not last or self.called or self._calls.required:  # what may begin a call that was cut off is no text
            said = said[: len(said) - _held(said)]
        if not last or self.called:
            said = said.rstrip()
        yield Said(self._take(len(said)))

    def _head(self, last: bool) -> Iterator[Event]:
        """The head of a call; a call that is not a JSON object stays text."""
        if head := HEAD.match(self._rest):
            yield self._call(head[1])
            self._take(head.end())
            self._read, self._depth, self._quoted = self._arguments, 0, False
            return
        inside, tag, _ = self._rest.partition(END)
        if tag or last:
            self._take(len(inside) + len(tag))
            found = _parsed(inside)
            if found is None:
                if tag or not (self._calls.required or self._calls.formed):  # such a call that was cut off is no text
                    yield Said(BEGIN + inside + tag)
                self._read = self._text
            else:
                yield self._call(found[0])
                yield Argued(found[1])
                self._read = self._behind

    def _arguments(self, last: bool) -> Iterator[Event]:
        """Arguments up to the closing brace, or up to invalid JSON."""
        for place, letter in enumerate(self._rest):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
                continue
            self._quoted = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if not self._depth or letter == "<":
                self._read = self._end
                yield Argued(self._take(place + (letter != "<")))
                return
        yield Argued(self._take(len(self._rest)))

    def _end(self, _: bool) -> Iterator[Event]:
        """The text after the arguments of a call."""
        if END in self._rest:
            self._rest, self._read = self._rest.partition(END)[2], self._behind
        yield from ()

    def _behind(self, _: bool) -> Iterator[Event]:
        """The text after a call."""
        self._read = self._nothing if self._calls.single else self._text
        yield from ()

    def _call(self, name: str) -> Called:
        self.called = True
        return Called(f"call_{uuid4().hex[:24]}", name)

    def _take(self, size: int) -> str:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _held(text: str) -> int:
    """Number of characters at the end of a text that may begin a call."""
    return max((size for size in range(1, len(BEGIN)) if text.endswith(BEGIN[:size])), default=0)


def _parsed(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call."""
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return str(name), arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
