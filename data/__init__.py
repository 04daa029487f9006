"""Prompts, conversations and corpora."""

from pathlib import Path

EMBEDDED = "embedded"
"""The name of the base that ships with this package."""


def resolve_base_name(name: str) -> str:
    """The directory of the embedded base for ``EMBEDDED``; any other name as it is.

    Raises:
        FileNotFoundError: This installation lacks the embedded base.
    """
    if name != EMBEDDED:
        return name
    directory = Path(__file__).parent / "embedded" / "base"
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"embedded base ({directory}) is missing; clone the repository again or name another base"
        )
    return str(directory)
