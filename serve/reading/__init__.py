"""Answers, read piece by piece: reasoning, text for the user, and calls of tools."""

from collections.abc import Iterator
from typing import Any

from medusa.serve.reading.events import Event, Reader, Said
from medusa.serve.reading.harmony import CHANNEL, MESSAGE, HarmonyReader
from medusa.serve.reading.thoughts import THOUGHT, ThoughtReader, begins_reasoning

ENDING = 16
"""Tokens of a prompt that show whether it begins the reasoning of an answer."""


def template_of(tokenizer: Any) -> str:
    """A tokenizer's chat template; "" if it has none, or several of which none is the usual one."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return ""


def is_harmony(template: str) -> bool:
    """Whether a model with this chat template writes Harmony."""
    return CHANNEL in template and MESSAGE in template


def may_think(template: str) -> bool:
    """Whether a model with this chat template may reason between ``<think>`` tags."""
    return THOUGHT in template and not is_harmony(template)


def reader_of(template: str, prompt: str) -> Reader:
    """The reader of an answer without calls.

    Args:
        template: The model's chat template.
        prompt: The end of the prompt.
    """
    if is_harmony(template):
        return HarmonyReader(tools=False, single=False)
    return ThoughtReader(TextReader(), begins_reasoning(prompt)) if may_think(template) else TextReader()


class TextReader(Reader):
    """Reads an answer that is text alone."""

    def _begin(self, last: bool) -> Iterator[Event]:
        yield Said(self._take(len(self._rest)))
