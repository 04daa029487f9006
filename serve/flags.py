"""Command-line flags as fields of a dataclass, each with its default, parser and help.

Example:
    class EngineSettings:
        max_batch: int = flag(64, "requests that decode together", at_least(1), "N")
"""

import argparse
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def flag(
    default: Any, text: str, parse: Callable[[str], Any] | None = None, metavar: str | None = None, **more: Any
) -> Any:
    """A dataclass field that is also a flag; with the default False the flag takes no value.

    Args:
        default: Default of field and flag.
        text: The help; the default is added if it does not mention it.
        parse: Parser of the value.
        metavar: Name of the value in the help.
        more: Other arguments of ``add_argument``.
    """
    if default is False:
        more["action"] = "store_true"
    else:
        more |= {"type": parse, "metavar": metavar}
    if "(default" not in text:
        text += " (default: off)" if default is False else " (default: %(default)s)" if default else " (default: none)"
    return field(default=default, metadata=more | {"help": text})


def add_flags(parser: "argparse._ActionsContainer", kind: type) -> None:
    """Add the flags of a dataclass to a parser or a group of one."""
    for each in fields(kind):
        if each.metadata:
            parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **each.metadata)


def from_flags(kind: type[Kind], args: argparse.Namespace, **more: Any) -> Kind:
    """An object of the dataclass from parsed flags and other fields."""
    given = {each.name: getattr(args, each.name) for each in fields(kind) if each.metadata}  # type: ignore[arg-type]
    return kind(**given | more)
