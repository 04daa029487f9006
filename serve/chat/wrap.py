"""Lines that break between words, of text that arrives piece by piece."""

import unicodedata
from collections.abc import Callable
from itertools import groupby

TAB = 8


class Wrapper:
    """Follows the cursor, and takes a word that reaches the edge over to the next line.

    Args:
        columns: Width of the terminal, asked for every piece.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._word: list[tuple[str, str]] = []
        """Characters of the word that may go on, each with its style."""
        self._begun = 0
        """Columns of that word."""

    def feed(self, text: str, style: str = "") -> list[tuple[str, str]]:
        """What to write: texts, each with its style.

        Args:
            text: The next piece.
            style: Of all of it.
        """
        columns = self._columns()
        out: list[tuple[str, str]] = []
        for char in text:
            if char in " \t\n":
                out += self._space(char, style, columns)
            else:
                out += self._letter(char, style, columns)
        return [("".join(char for char, _ in run), style) for style, run in groupby(out, key=lambda one: one[1])]

    def _space(self, char: str, style: str, columns: int) -> list[tuple[str, str]]:
        self._end_word()
        if char == "\n" or self._column >= columns - 1:
            self._column = 0
            return [("\n", style)]
        self._column += TAB - self._column % TAB if char == "\t" else 1
        return [(char, style)]

    def _letter(self, char: str, style: str, columns: int) -> list[tuple[str, str]]:
        """A character of a word; the last column stays free, since a cursor behind it is in no column."""
        width, out = cells(char), []
        if width > 1:
            self._end_word()  # scripts of wide characters break anywhere
        if self._column + width > columns - 1 and self._begun < self._column:
            out = [(f"\x1b[{self._begun}D\x1b[K" * (self._begun > 0) + "\n", ""), *self._word]
            self._column = self._begun
        elif self._column + width > columns:  # a word longer than a line: the terminal breaks it
            self._column = 0
        self._column += width
        self._begun += width
        self._word.append((char, style))
        return [*out, (char, style)]

    def _end_word(self) -> None:
        self._word.clear()
        self._begun = 0


def cells(char: str) -> int:
    """Columns that a terminal gives a character."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 1 + (unicodedata.east_asian_width(char) in "WF")
