"""Answers that begin with reasoning between ``<think>`` tags (Qwen 3, DeepSeek-R1, SmolLM3 and others)."""

from collections.abc import Iterator

from medusa.serve.reading.events import Event, Reader, Reasoned, held

THINK, THOUGHT = "<think>", "</think>"


def begins_reasoning(prompt: str) -> bool:
    """Whether a prompt that ends so begins the reasoning of the answer."""
    return prompt.rstrip().endswith(THINK)


class ThoughtReader(Reader):
    """Reads reasoning, and gives the rest to another reader.

    Args:
        answer: Reads what follows the reasoning.
        thinking: Whether the prompt has begun the reasoning.
    """

    def __init__(self, answer: Reader, thinking: bool) -> None:
        super().__init__()
        self._answer = answer
        if thinking:
            self._state, self._then = self._spaces, self._reasoning

    def _begin(self, last: bool) -> Iterator[Event]:
        """The first tag, or no reasoning."""
        begun = self._rest.lstrip()
        if begun.startswith(THINK):
            self._rest, self._state, self._then = begun.removeprefix(THINK), self._spaces, self._reasoning
        elif last or not THINK.startswith(begun):
            self._state = self._after
        yield from ()

    def _reasoning(self, last: bool) -> Iterator[Event]:
        """Reasoning up to the last tag; white space around it is left out."""
        said, tag, rest = self._rest.partition(THOUGHT)
        if tag:
            yield Reasoned(said.rstrip())
            self._rest, self._state, self._then = rest, self._spaces, self._after
            return
        said = said if last else said[: len(said) - held(said, THOUGHT)]
        yield Reasoned(self._take(len(said.rstrip())))

    def _spaces(self, last: bool) -> Iterator[Event]:
        """White space is left out, and the next state begins behind it."""
        self._rest = self._rest.lstrip()
        self._state = self._then if self._rest or last else self._state
        yield from ()

    def _after(self, last: bool) -> Iterator[Event]:
        text = self._take(len(self._rest))
        yield from self._answer.read(text, last)
        self.called = self._answer.called
