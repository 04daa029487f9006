"""Answers that begin with reasoning between two tags, as ``<think>`` and ``</think>``."""

from collections.abc import Iterator
from typing import NamedTuple

from medusa.serve.reading.events import Event, Reader, Reasoned, held


class Tags(NamedTuple):
    """The tags around reasoning.

    Attributes:
        begin: The first one.
        end: The last one.
        special: Whether they are special tokens, which the text has to contain.
    """

    begin: str
    end: str
    special: bool = False

    def begun(self, prompt: str) -> bool:
        """Whether a prompt that ends so begins the reasoning of the answer."""
        return prompt.rstrip().endswith(self.begin)


KNOWN = (
    Tags("<think>", "</think>"),  # Qwen 3, DeepSeek-R1, SmolLM3 and others
    Tags("<|channel>thought", "<channel|>", special=True),  # Gemma 4
    Tags("[THINK]", "[/THINK]", special=True),  # Magistral
)


class ThoughtReader(Reader):
    """Reads reasoning, and gives the rest to another reader.

    Args:
        answer: Reads what follows the reasoning.
        tags: The tags around it.
        thinking: Whether the prompt has begun the reasoning.
    """

    def __init__(self, answer: Reader, tags: Tags, thinking: bool) -> None:
        super().__init__()
        self._answer, self._tags = answer, tags
        if thinking:
            self._state, self._then = self._spaces, self._reasoning

    def _begin(self, last: bool) -> Iterator[Event]:
        """The first tag, or no reasoning."""
        begun, tag = self._rest.lstrip(), self._tags.begin
        if begun.startswith(tag):
            self._rest, self._state, self._then = begun.removeprefix(tag), self._spaces, self._reasoning
        elif last or not tag.startswith(begun):
            self._state = self._after
        yield from ()

    def _reasoning(self, last: bool) -> Iterator[Event]:
        """Reasoning up to the last tag; white space around it is left out."""
        said, tag, rest = self._rest.partition(self._tags.end)
        if tag:
            yield Reasoned(said.rstrip())
            self._rest, self._state, self._then = rest, self._spaces, self._after
            return
        said = said if last else said[: len(said) - held(said, self._tags.end)]
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
