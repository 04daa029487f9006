"""Flags of a command line as fields of a dataclass: the default, the parser and the help of each in one place.

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
    """A field that is a flag too; one whose default is False takes no value.

    Args:
        default: Of both.
        text: The help; the default is added where it does not say it.
        parse: Of the value.
        metavar: Of the value.
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
    """Give a parser, or a group of one, the flags of a dataclass."""
    for each in fields(kind):
        if each.metadata:
            parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **each.metadata)


def from_flags(kind: type[Kind], args: argparse.Namespace, **more: Any) -> Kind:
    """An object of the dataclass, from what was parsed and other fields."""
    given = {each.name: getattr(args, each.name) for each in fields(kind) if each.metadata}  # type: ignore[arg-type]
    return kind(**given | more)
