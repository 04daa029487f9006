"""Whether a text says what another one says: the same words in the same order (Brown et al. 2020, appendix C)."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from medusa.data.files import file_records
from medusa.data.shapes import conversation

WORDS = 13
"""Words in a row that two texts may not share; a shorter text counts as a whole."""
WORD = re.compile(r"\w+")


class Overlap:
    """Texts that others may not overlap with.

    Args:
        texts: What was said elsewhere, as the questions of an evaluation.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._grams: set[int] = set()
        self._whole: set[int] = set()
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """One more text."""
        words = WORD.findall(text.lower())
        self._whole.add(as_whole(text))
        self._grams.update(_grams(words))

    def __contains__(self, text: str) -> bool:
        """Whether it is one of the texts, or shares ``WORDS`` words in a row with one."""
        words = WORD.findall(text.lower())
        return as_whole(text) in self._whole or any(gram in self._grams for gram in _grams(words))


def as_whole(text: str) -> int:
    """Equal for texts that are the same but for case and punctuation."""
    return hash(tuple(WORD.findall(text.lower())))


def _grams(words: list[str]) -> Iterator[int]:
    return (hash(tuple(words[at : at + WORDS])) for at in range(len(words) - WORDS + 1))


def evaluation_texts(path: str | Path) -> Iterator[str]:
    """What the questions of a file say: Spec-Bench's ``turns``, or what users and passages say in conversations.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A record that is no question; names the place.
    """
    for place, record in file_records(path):
        if isinstance(turns := record.get("turns"), list):
            yield from map(str, turns)
        elif found := conversation(record):
            yield from (str(turn["content"]) for turn in found)
        else:
            raise ValueError(f"{place}: no question; give turns, messages or prompt")
