"""Answers, read piece by piece: reasoning, text for the user, and calls of tools."""

from collections.abc import Iterator
from typing import Any

from medusa.serve.reading.events import Event, Reader, Said
from medusa.serve.reading.harmony import CHANNEL, MESSAGE, HarmonyReader
from medusa.serve.reading.thoughts import KNOWN, Tags, ThoughtReader

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


def tags_of(template: str) -> Tags | None:
    """The tags around the reasoning of a model with this chat template; None = it has none."""
    return None if is_harmony(template) else next((tags for tags in KNOWN if tags.end in template), None)


def needs_special_tokens(template: str) -> bool:
    """Whether answers of a model with this chat template are read by special tokens, which the text has to contain."""
    tags = tags_of(template)
    return is_harmony(template) or (tags is not None and tags.special)


def reader_of(template: str, prompt: str) -> Reader:
    """The reader of an answer without calls.

    Args:
        template: The model's chat template.
        prompt: The end of the prompt.
    """
    if is_harmony(template):
        return HarmonyReader(tools=False, single=False)
    tags = tags_of(template)
    return TextReader() if tags is None else ThoughtReader(TextReader(), tags, tags.begun(prompt))


class TextReader(Reader):
    """Reads an answer that is text alone."""

    def _begin(self, last: bool) -> Iterator[Event]:
        yield Said(self._take(len(self._rest)))
