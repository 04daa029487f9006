"""Lines break between words, whatever pieces text arrives in."""

import random
import re

import pytest

from medusa.serve.chat.wrap import Wrapper, cells


def shown(pieces, columns):
    """The lines of a terminal that obeys what was written, and their styles."""
    lines, wrapper, at = [[]], Wrapper(lambda: columns), 0
    for piece in pieces:
        for text, style in wrapper.feed(*piece):
            for code in re.findall(r"\x1b\[\d*[DK]|.|\n", text):
                if code == "\n":
                    lines.append([])
                    at = 0
                elif code.endswith("D") and code.startswith("\x1b"):
                    at -= int(code[2:-1])
                    assert at >= 0
                elif code == "\x1b[K":
                    del lines[-1][at:]
                else:
                    if at + cells(code) > columns:
                        lines.append([])
                        at = 0
                    lines[-1].append((code, style))
                    at += cells(code)
    return lines


def texts(lines):
    return ["".join(char for char, _ in line).rstrip(" ") for line in lines]


def test_a_word_at_the_edge_moves_to_the_next_line_with_its_colours():
    lines = shown([("a word th", ""), ("at moves", "green")], 11)
    assert texts(lines) == ["a word", "that moves"]
    assert lines[1][1:3] == [("h", ""), ("a", "green")]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_give_the_same_lines(seed):
    random.seed(seed)
    words = ["".join(random.choices("abcdé", k=random.randint(1, 9))) for _ in range(40)]
    text, columns = " ".join(words), random.randint(10, 30)
    cuts = sorted(random.sample(range(len(text)), 15))
    pieces = [(text[begin:end], "") for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    lines = texts(shown(pieces, columns))
    assert lines == texts(shown([(text, "")], columns))
    assert " ".join(lines) == text
    assert all(len(line) < columns for line in lines)
    assert all(len(line) + 1 + len(word) >= columns for line, word in zip(lines, map(first, lines[1:]), strict=False))


def first(line):
    return line.split(" ")[0]


def test_long_words_are_left_to_the_terminal_and_wide_characters_break_anywhere():
    assert texts(shown([("see " + "x" * 25 + " end", "")], 10)) == ["see", "x" * 10, "x" * 10, "x" * 5 + " end"]
    assert texts(shown([("天地玄黄宇宙", "")], 10)) == ["天地玄黄", "宇宙"]


def test_indentation_and_line_ends_stay():
    assert texts(shown([("def f():\n    return 1\n", "")], 20)) == ["def f():", "    return 1", ""]
