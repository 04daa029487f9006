"""Drafter and tree size as a JSON file, as ``medusa bench tune`` writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa.files import header, read_json, write_json
from medusa.sampling import Speculation

REMEDY = "make one with medusa bench tune --out"


def save_settings(speculation: Speculation, path: str | Path, details: Mapping[str, Any] | None = None) -> None:
    """Write drafter and nodes as one JSON file, whole or not at all.

    Args:
        speculation: The settings; the drafter must be a name or None.
        path: The file.
        details: Further keys, for example how the settings were found. Nothing reads them.
    """
    values = {"drafter": speculation.drafter, "nodes": speculation.nodes}
    write_json(Path(path), header("settings") | values | dict(details or {}))


def load_settings(path: str | Path) -> Speculation:
    """Read what ``save_settings`` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds no settings, or invalid ones.
    """
    values = read_json(Path(path), "settings", REMEDY)
    drafter = values.get("drafter")
    try:
        if drafter is not None and not isinstance(drafter, str):
            raise ValueError(f"drafter ({drafter!r}) is no name")
        return Speculation(drafter=drafter, nodes=values["nodes"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"settings ({path}) are damaged: {error!r}; {REMEDY}") from error
