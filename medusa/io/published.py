"""What heads say of themselves when they leave the machine: no places on its disk, no users' names, no commands."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRIVATE = ("command", "base_path")
"""Keys whose values stay: a command line may hold anything, and where a base lies here helps nobody elsewhere."""
OWN = ("config.json", "provenance.json", "calibration.json", "adapter_config.json")
"""Files of heads, all of whose values are looked at."""
NAMES = ("base", "base_model_name_or_path", "name_or_path", "_name_or_path")
"""Keys of a model's name."""
RELATIVE = re.compile(r"(?:\.\.[/\\])+.*?([^/\\]+)[/\\]?")
"""A whole value that leads out of a directory: on the way may be anybody's home."""
WHOLE = re.compile(r"(?:~[^/\\]*|[A-Za-z]:)?[/\\].*?([^/\\]+)[/\\]?")
"""A whole value that is a place on a disk."""
INSIDE = re.compile(r"(?<![\w.~:/\\])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\'\",;:()]+[/\\])+([^\s/\\'\",;:()]*)")
"""Such a place in a longer text; addresses (https://...) are none."""


def published(values: Any) -> Any:
    """Values of JSON without what is private: of a place on a disk its last name stays.

    A path that leads out of a directory becomes "./NAME", which is no address on the Hub.

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
    """What is to be sent of a file: the file, or the text of a JSON file that holds something private.

    Of files that others wrote (a tokenizer's are full of text) only the keys of `NAMES` are looked at.
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
    """A base as programs look it up: one on this disk becomes "./NAME", which is no address on the Hub."""
    found: str = published(name)
    return found if found == name or found.startswith("./") else f"./{found}"
