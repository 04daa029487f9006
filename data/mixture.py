"""The definition of a mixture of prompts: sources on this machine, and questions about their texts."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from medusa.data.files import file_records
from medusa.data.shapes import present, questions
from medusa.data.yaml_file import read_yaml

EXAMPLE = Path(__file__).parent / "mixtures" / "smollm2.yaml"

FIELD = re.compile(r"\{(\w+)\}")
SENTENCE = "# text = "
"""Text before a sentence in a treebank (CoNLL-U)."""
YAML_TYPES: dict[Any, Any] = {tuple: list, str: str, int: int, float: int | float, bool: bool}
"""Types of values in a file, by types of fields."""


@dataclass(frozen=True)
class MixtureSource:
    """Texts of one origin."""

    name: str
    kind: str
    """The kind of question, for example "summary"."""
    files: tuple[str, ...]
    """Patterns of files below the directory of the sources: .jsonl, .json and .parquet (records), .conllu (sentences)
    and .txt (lines). A pattern that begins with "!" excludes files."""
    licence: str
    url: str
    asks: tuple[str, ...] = ()
    """Questions of a user, used in turn: "{field}" is a field of the record, "{text}" a sentence or line. Empty:
    records are conversations, and their user turns are used."""
    most: int = 0
    """Most prompts; 0 = all."""
    heldout: bool = False
    """Whether the whole source is held out."""

    def turns(self, directory: Path) -> Iterator[list[str]]:
        """The user's turns of each conversation of the source.

        Raises:
            FileNotFoundError: No file matches.
            ValueError: A record lacks a field, or is not a conversation.
        """
        number = 0
        for file in self._found(directory):
            for place, record in _records(file):
                if self.asks:
                    yield [_filled(self.asks[number % len(self.asks)], record, place)]
                elif said := [turn["content"] for turn in questions(record) or () if turn["role"] == "user"]:
                    yield said
                else:
                    raise ValueError(f"{place}: it has no user turn; give its source questions (asks)")
                number += 1

    def _found(self, directory: Path) -> list[Path]:
        found: set[Path] = set()
        for pattern in self.files:
            matching = set(directory.glob(pattern.removeprefix("!")))
            found = found - matching if pattern.startswith("!") else found | matching
        if not found:
            raise FileNotFoundError(
                f"source {self.name} ({', '.join(self.files)}) has no file below {directory}; get it from {self.url}"
            )
        return sorted(file for file in found if file.stat().st_size)


@dataclass(frozen=True)
class Mixture:
    """Sources, and how they are mixed."""

    sources: tuple[MixtureSource, ...]
    second_turns: tuple[str, ...] = ()
    """Second turns of a user, after an answer."""
    second_share: float = 0.0
    """Share of one-turn conversations that get a second turn."""
    most_tokens: int = 2000
    """Most tokens of a prompt; longer ones are left out."""
    long_tokens: int = 1000
    """Prompts with more tokens count as long."""
    long_share: float = 0.1
    """Largest share of long prompts; further ones are left out."""

    @classmethod
    def read(cls, path: Path) -> "Mixture":
        """Read the mixture from a YAML file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not a mixture; names the place.
        """
        if not path.is_file():
            raise FileNotFoundError(f"mixture ({path}) does not exist; give a .yaml file as {EXAMPLE}")
        try:
            content = read_yaml(path)
        except ValueError as error:
            raise ValueError(f"mixture ({path}) is not YAML in UTF-8: {error}; correct the file") from None
        if not isinstance(content, dict) or not isinstance(content.get("sources"), list) or not content["sources"]:
            raise ValueError(f"mixture ({path}) lists no sources; write sources: [{{name, kind, files, ...}}, ...]")
        sources = [_made(MixtureSource, one, f"{path}, source {at}") for at, one in enumerate(content["sources"], 1)]
        mixture: Mixture = _made(cls, {**content, "sources": sources}, str(path))
        return mixture


def _made(kind: type[Any], given: Any, place: str) -> Any:
    """Make an object from a mapping; lists become tuples."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} ({given!r:.60}) must be a mapping of {', '.join(fields)}")
    if unknown := [name for name in given if name not in fields]:
        raise ValueError(f"{place}: {unknown[0]} is not known; known are {', '.join(fields)}")
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if not given.get(name)]:
        raise ValueError(f"{place} lacks {missing[0]}; it needs {', '.join(needed)}")
    for name, value in given.items():
        plain = get_origin(fields[name].type) or fields[name].type
        if not isinstance(value, YAML_TYPES[plain]):
            raise ValueError(f"{place}: {name} ({value!r:.60}) must be {YAML_TYPES[plain]}; correct it")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Records of a file with their places; a sentence or line is {"text"}."""
    if file.suffix not in (".conllu", ".txt"):
        yield from file_records(file)
        return
    before = SENTENCE if file.suffix == ".conllu" else ""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.startswith(before) and (text := line.removeprefix(before).strip()):
                yield f"{file}, line {number}", {"prompt": text, "text": text}


def _filled(ask: str, record: Mapping[str, Any], place: str) -> str:
    """Insert the record's fields into a question; a line with a missing or empty field is left out."""
    known = present(record)
    if not any(str(known.get(name, "")).strip() for name in FIELD.findall(ask)):
        raise ValueError(f"{place} has none of the fields of {ask!r}; its fields are {', '.join(known)}")
    lines = [
        FIELD.sub(lambda match: str(known.get(match[1], "")), line)
        for line in ask.split("\n")
        if not (names := FIELD.findall(line)) or any(str(known.get(name, "")).strip() for name in names)
    ]
    return "\n".join(lines).strip()
