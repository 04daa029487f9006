"""The embedded corpus: the running interpreter's standard library as code documents and as chat pairs.

A machine without a network still has a few megabytes of good Python on disk. Modules are divided by name into a fixed
training and a held-out side, so that figures on held-out prompts are about text that the base never saw.
"""

import ast
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELD_OUT = frozenset(
    "bisect calendar cmd colorsys configparser copy csv fnmatch fractions graphlib gzip heapq json mailbox netrc pprint"
    " queue reprlib sched shelve shlex statistics string tarfile telnetlib textwrap wave zipapp".split()
)
"""Top-level modules and packages that are never used in training."""

EXCLUDED_DIRECTORIES = frozenset(
    "site-packages __pycache__ test tests idle_test encodings pydoc_data turtledemo ensurepip __phello__".split()
)
"""Excluded modules: not installed everywhere (the tests), or tables and generated text instead of code."""

CONTEXT_CHARACTERS = 1200
"""Most characters of a file before the function to complete (whole lines)."""
MAX_ANSWER_LINES = 40
NEAR_DUPLICATE = 0.4
"""A training file that shares this fraction of its distinct lines with a held-out file is left out."""


@dataclass(frozen=True)
class ChatPair:
    """A request for one function, and the library's function."""

    request: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The pair as ``messages`` for chat templates."""
        return [{"role": "user", "content": self.request}, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True)
class Document:
    """One source file.

    Attributes:
        name: Path below the library's root, for example ``json/decoder.py``.
        text: Source text with Unix line ends.
        pairs: See ``chat_pairs``.
        beginnings: See ``completion_prompts``.
    """

    name: str
    text: str
    pairs: tuple[ChatPair, ...]
    beginnings: tuple[str, ...]


@cache
def documents(split: Split) -> tuple[Document, ...]:
    """The library's source files on one side of the split, in a fixed order.

    Files that cannot be read as UTF-8 or parsed as Python are left out, and so are training files that are near
    duplicates of a held-out one (copies under another name would leak the held-out text into training).
    """
    if split == "heldout":
        return tuple(_library_files("heldout"))
    held_out_lines = [_significant_lines(document.text) for document in documents("heldout")]
    return tuple(document for document in _library_files("train") if not _near_duplicate(document, held_out_lines))


@cache
def chat_pairs(split: Split) -> tuple[ChatPair, ...]:
    """One request and answer for every documented function of at most ``MAX_ANSWER_LINES`` lines."""
    return tuple({pair.answer: pair for document in documents(split) for pair in document.pairs}.values())


def completion_prompts(split: Split) -> tuple[str, ...]:
    """Beginnings of functions in their files: the preceding text, the signature and the docstring."""
    return tuple(beginning for document in documents(split) for beginning in document.beginnings)


def _library_files(split: Split) -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_modules(root)):
        relative = path.relative_to(root)
        top = relative.parts[0].removesuffix(".py").lstrip("_")
        if (top in HELD_OUT) != (split == "heldout") or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            functions = [*_functions(ast.parse(text))]
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if text.strip():
            pairs, beginnings = tuple(_pairs(text, functions)), tuple(_beginnings(text, functions))
            yield Document(relative.as_posix(), text, pairs, beginnings)


def _modules(root: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        folders[:] = set(folders) - EXCLUDED_DIRECTORIES  # site-packages may hold more than all the library
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def _significant_lines(text: str) -> frozenset[str]:
    return frozenset(line for raw in text.splitlines() if len(line := raw.strip()) > 12)


def _near_duplicate(document: Document, held_out_lines: list[frozenset[str]]) -> bool:
    lines = _significant_lines(document.text)
    return any(len(lines & other) > NEAR_DUPLICATE * max(len(lines), 1) for other in held_out_lines)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.Module) -> Iterator[Function]:
    """Documented functions and methods, outermost first, without functions inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function) and ast.get_docstring(node):
            yield node
        elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
            yield from _functions(ast.Module(body=node.body, type_ignores=[]))


def _beginnings(text: str, functions: Iterable[Function]) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    for function in functions:
        body_line = function.body[1].lineno if len(function.body) > 1 else function.body[0].lineno
        if body_line <= function.lineno or (function.end_lineno or 0) - body_line < 3:
            continue
        start = function.lineno - 1
        while start > 0 and sum(map(len, lines[start - 1 : function.lineno - 1])) <= CONTEXT_CHARACTERS:
            start -= 1
        # No final line end, because tokenizers join it with the following indentation.
        yield "".join(lines[start : body_line - 1]).rstrip()


def _pairs(text: str, functions: Iterable[Function]) -> Iterator[ChatPair]:
    lines = text.splitlines()
    for function in functions:
        end = function.end_lineno or function.lineno
        first_sentence = _first_sentence(ast.get_docstring(function) or "")
        if end - function.lineno >= MAX_ANSWER_LINES or len(function.body) < 2 or not first_sentence:
            continue
        indent = function.col_offset
        source = "\n".join(
            line[indent:] if not line[:indent].strip() else line for line in lines[function.lineno - 1 : end]
        )
        request = _request(function.name, f"{function.name}({ast.unparse(function.args)})", first_sentence)
        yield ChatPair(request, f"```python\n{source}\n```")


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0].rstrip(".")
    return sentence if 8 <= len(sentence) <= 200 else ""


def _request(name: str, signature: str, sentence: str) -> str:
    """A request in one of four wordings, chosen by the name, so that every run makes the same pair."""
    lowered = sentence[0].lower() + sentence[1:] if sentence[1:2].islower() else sentence
    first_word = lowered.split(maxsplit=1)[0]
    task = f"that {lowered}" if first_word.endswith("s") and not first_word.endswith("ss") else f"to {lowered}"
    wordings = (
        f"Write a Python function {task}.",
        f"Write a Python function `{name}` {task}.",
        f"Write a Python function `{signature}` {task}.",
        f"Write a Python function `{signature}`: {sentence}.",
    )
    return wordings[hashlib.blake2b(f"{name}{sentence}".encode(), digest_size=1).digest()[0] % len(wordings)]
