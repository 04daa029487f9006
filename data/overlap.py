"""Tests whether texts overlap: the same words in the same order (Brown et al. 2020, appendix C)."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from medusa.data.files import file_records
from medusa.data.shapes import questions

WORDS = 13
"""Number of successive words that two texts may not share; a shorter text is compared as a whole."""
WORD = re.compile(r"\w+")


class Overlap:
    """A set of texts with which other texts may not overlap.

    Args:
        texts: The texts, for example questions of an evaluation.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._grams: set[int] = set()
        self._whole: set[int] = set()
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Add a text."""
        words = WORD.findall(text.lower())
        self._whole.add(as_whole(text))
        self._grams.update(_grams(words))

    def __contains__(self, text: str) -> bool:
        """Whether a text equals one of the texts, or shares ``WORDS`` successive words with one."""
        words = WORD.findall(text.lower())
        return as_whole(text) in self._whole or any(gram in self._grams for gram in _grams(words))


def as_whole(text: str) -> int:
    """A hash that is equal for texts that differ only in case and punctuation."""
    return hash(tuple(WORD.findall(text.lower())))


def _grams(words: list[str]) -> Iterator[int]:
    return (hash(tuple(words[at : at + WORDS])) for at in range(len(words) - WORDS + 1))


def evaluation_texts(path: str | Path) -> Iterator[str]:
    """Texts of the questions in a file: Spec-Bench's ``turns``, or turns of users and passages in conversations.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A record is not a question; names the place.
    """
    for place, record in file_records(path):
        if isinstance(turns := record.get("turns"), list):
            yield from map(str, turns)
        elif found := questions(record):
            yield from (str(turn["content"]) for turn in found if turn["role"] != "assistant")
        else:
            raise ValueError(f"{place}: no question; give turns, messages or prompt")
