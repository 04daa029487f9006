"""Wraps text that arrives piece by piece, with line breaks between words."""

import unicodedata
from collections.abc import Callable
from itertools import groupby

TAB = 8


class Wrapper:
    """Tracks the cursor, and moves a word that reaches the edge to the next line.

    Args:
        columns: Returns the width of the terminal; called for every piece.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._word: list[tuple[str, str]] = []
        """Characters of the current word, each with its style."""
        self._begun = 0
        """Columns of the current word."""

    def feed(self, text: str, style: str = "") -> list[tuple[str, str]]:
        """Wrap a piece; returns the texts to write, each with its style.

        Args:
            text: The next piece.
            style: Style of the whole piece.
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
        """Add a character of a word; the last column stays free, because a cursor after it has no defined column."""
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
    """Number of columns of a character in a terminal."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 1 + (unicodedata.east_asian_width(char) in "WF")
