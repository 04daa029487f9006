"""Reads text and tool calls of an answer, which stand between ``<tool_call>`` tags."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress

from medusa.serve.api.tools import BEGIN, END, UNREADABLE, Calls, named_call
from medusa.serve.api.xml_calls import read_call
from medusa.serve.reading.events import Argued, Event, Reader, Said, held

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The usual beginning of a call up to its arguments; other calls are read when they are complete."""


class CallReader(Reader):
    """Reads one answer.

    Args:
        calls: The rules for tool calls of the request.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls
        self._depth, self._quoted, self._escaped = 0, False, False

    def _begin(self, last: bool) -> Iterator[Event]:
        self._state = self._all if not self._calls.tools else self._named if self._calls.name else self._text
        yield from self._state(last)

    def _all(self, _: bool) -> Iterator[Event]:
        yield Said(self._take(len(self._rest)))

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
            self._state = self._head
            return
        if not last or self.called or self._calls.required:  # what may begin a call that was cut off is no text
            said = said[: len(said) - held(said, BEGIN)]
        if not last or self.called:
            said = said.rstrip()
        yield Said(self._take(len(said)))

    def _head(self, last: bool) -> Iterator[Event]:
        """The head of a call; a call that is not a JSON object stays text."""
        if head := HEAD.match(self._rest):
            yield self._call(head[1])
            self._take(head.end())
            self._state, self._depth, self._quoted = self._arguments, 0, False
            return
        if last or END in self._rest:
            inside, tag, _ = self._rest.partition(END)
            self._take(len(inside) + len(tag))
            found = self._found(inside, bool(tag))
            if found is None:
                if tag or not (self._calls.required or self._calls.formed):  # such a call that was cut off is no text
                    yield Said(BEGIN + inside + tag)
                self._state = self._text
            else:
                yield self._call(found[0])
                yield Argued(found[1])
                self._state = self._behind

    def _found(self, text: str, whole: bool) -> tuple[str, str] | None:
        """Name and arguments of a call whose last tag has been written or not; None = it is none."""
        with suppress(*UNREADABLE):
            return named_call(json.loads(text))
        with suppress(*UNREADABLE):
            return read_call(text, self._calls.tools, whole)
        return None

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
                self._state = self._end
                yield Argued(self._take(place + (letter != "<")))
                return
        yield Argued(self._take(len(self._rest)))

    def _end(self, _: bool) -> Iterator[Event]:
        """The text after the arguments of a call."""
        if END in self._rest:
            self._rest, self._state = self._rest.partition(END)[2], self._behind
        yield from ()

    def _behind(self, _: bool) -> Iterator[Event]:
        """The text after a call."""
        self._state = self._nothing if self._calls.single else self._text
        yield from ()
