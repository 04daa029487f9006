"""What heads say of themselves when they leave the machine: no places on its disk, no users' names, no commands."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRIVATE = ("command",)
"""Keys whose values stay: a command line may hold anything."""
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


def published_config(values: Any) -> Any:
    """`published`, of a file in which programs look up a base: one on this disk becomes "./NAME"."""
    found = published(values)
    if isinstance(values, Mapping):
        for key in ("base", "base_model_name_or_path"):
            if isinstance(name := values.get(key), str) and name != found[key] and not found[key].startswith("./"):
                found[key] = f"./{found[key]}"
    return found


def published_file(path: Path) -> bytes | Path:
    """What is to be sent of a file: the file, or the text of a JSON file that holds something private."""
    if path.suffix != ".json":
        return path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return path
    found = published_config(values)
    return path if found == values else (json.dumps(found, indent=2) + "\n").encode()
