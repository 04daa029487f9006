"""Answers in Harmony, the format of GPT-OSS: messages on channels, some of them calls.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``; the text of a message to
``functions.NAME`` is the arguments of a call. Tags are special tokens, which the text has to contain.
"""

import re
from collections.abc import Callable, Iterator

from medusa.serve.reading.events import Argued, Event, Reader, Reasoned, Said, held

CHANNEL, MESSAGE, ENDS = "<|channel|>", "<|message|>", ("<|end|>", "<|start|>", "<|return|>", "<|call|>")
TO = "to=functions."
REASONING, FINAL, CALLS = "analysis", "final", "commentary"
"""Channels."""
END = re.compile("|".join(map(re.escape, ENDS)))
NAME, RECIPIENT = re.compile(rf"{re.escape(CHANNEL)}(\w+)"), re.compile(rf"{re.escape(TO)}([\w.-]+)")


class HarmonyReader(Reader):
    """Reads one answer.

    Args:
        tools: Whether messages to functions are calls.
        single: Whether the first call ends the answer.
    """

    def __init__(self, tools: bool, single: bool) -> None:
        super().__init__()
        self._tools, self._single = tools, single
        self._kind: Callable[[str], Event] = Said
        self._said = False

    def _begin(self, last: bool) -> Iterator[Event]:
        """The first message; text that does not begin with a channel or a recipient is for the user."""
        begun = self._rest.lstrip()
        if not any(first.startswith(begun[: len(first)]) for first in (CHANNEL, TO)):
            self._state = self._body
        elif begun:
            yield from self._header(last)

    def _header(self, last: bool) -> Iterator[Event]:
        """Channel and recipient of the next message, and the name of its writer."""
        if MESSAGE not in self._rest:
            self._state = self._nothing if last else self._state
            return
        header, _, rest = self._rest.partition(MESSAGE)
        self._rest, self._state = rest, self._body
        channel, recipient = NAME.search(header), RECIPIENT.search(header)
        if recipient and self._tools:
            if self.called and self._single:
                self._state = self._nothing
                return
            yield self._call(recipient[1])
            self._kind = Argued
        elif recipient or (channel and channel[1] == REASONING):
            self._kind = Reasoned
        else:
            if self._said:
                yield Said("\n\n")  # what it said before calls, and its answer
            self._kind, self._said = Said, True

    def _body(self, last: bool) -> Iterator[Event]:
        """The text of a message up to the next tag."""
        if end := END.search(self._rest):
            yield self._kind(self._take(end.start()))
            self._take(len(end[0]))
            self._state = self._header
        else:
            kept = 0 if last else max(held(self._rest, tag) for tag in ENDS)
            yield self._kind(self._take(len(self._rest) - kept))
