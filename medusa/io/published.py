"""Removes private values from heads that leave the machine: local paths, users' names and commands."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRIVATE = ("command", "base_path")
"""Keys that are removed: a command line may hold anything, and a local path of the base is useless elsewhere."""
OWN = ("config.json", "provenance.json", "calibration.json", "adapter_config.json")
"""Files of heads in which all values are checked."""
NAMES = ("base", "base_model_name_or_path", "name_or_path", "_name_or_path")
"""Keys of a model's name."""
RELATIVE = re.compile(r"(?:\.\.[/\\])+.*?([^/\\]+)[/\\]?")
"""A whole value that is a path out of the directory, which may contain a home directory."""
WHOLE = re.compile(r"(?:~[^/\\]*|[A-Za-z]:)?[/\\].*?([^/\\]+)[/\\]?")
"""A whole value that is a local path."""
INSIDE = re.compile(r"(?<![\w.~:/\\])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\'\",;:()]+[/\\])+([^\s/\\'\",;:()]*)")
"""A local path inside a longer text; addresses (https://...) are not matched."""


def published(values: Any) -> Any:
    """JSON values without private ones; of a local path only the last part is kept.

    A path out of the directory becomes "./NAME", which cannot be a Hub id.

    Example:
        {"source": "/home/ann/chats.jsonl", "command": "..."} -> {"source": "chats.jsonl"}
    """
    if isinstance(values, Mapping):
        return {key: published(value) for key, value in values.items() if key not in PRIVATE}
    if isinstance(values, list | tuple):
        return [published(value) for value in values]
    if not isinstance(values, str):
        return values
    if found := RELATIVE.fullmatch(values):
        return f"./{found[1]}"
    if found := WHOLE.fullmatch(values):
        return found[1]
    return INSIDE.sub(r"\1", values)


def published_file(path: Path) -> bytes | Path:
    """The content of a file for sending: the file itself, or new text for a JSON file with private values.

    In files of other programs (a tokenizer's are full of text) only the keys of `NAMES` are checked.
    """
    if path.suffix != ".json":
        return path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return path
    if not isinstance(values, dict):
        return path
    found = published(values) if path.name in OWN else dict(values)
    found |= {key: _base_name(values[key]) for key in NAMES if isinstance(values.get(key), str)}
    return path if found == values else (json.dumps(found, indent=2) + "\n").encode()


def _base_name(name: str) -> str:
    """The name of a base for programs; a local path becomes "./NAME", which cannot be a Hub id."""
    found: str = published(name)
    return found if found == name or found.startswith("./") else f"./{found}"
