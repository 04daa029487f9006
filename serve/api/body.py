"""Base classes of request bodies: unknown fields are ignored, and named in the answer."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Fields"
MOST_NAMED = 512
"""Most characters of the names in a header."""
Entry = TypeVar("Entry")
ListOf = Annotated[list[Entry], Field(fail_fast=True)]
"""A list that is read up to its first error: errors of a million entries would stop the server for a minute."""


class Body(BaseModel):
    """A part of a request. Fields with null count as absent."""

    model_config = ConfigDict(extra="allow")
    unused: ClassVar[bool] = False
    """Whether this part of a request has no effect, and is named as unknown fields are."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Remove null fields: clients send back answers with all their empty fields."""
        if not isinstance(value, dict):
            return value
        return {name: inner for name, inner in value.items() if inner is not None}


class StrictBody(Body):
    """A part with our own fields, so that an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


def ignored(value: Any, place: str = "") -> Iterator[str]:
    """Names of a body's unknown fields."""
    if isinstance(value, Body) and value.unused:
        yield place.removesuffix(".")
    elif isinstance(value, Body):
        yield from (f"{place}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from ignored(getattr(value, name), f"{place}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], Body):
        for index, inner in enumerate(value):
            yield from ignored(inner, f"{place}{index}.")


def named(fields: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields, which are also logged.

    The names come from clients, so characters that a header may not hold are removed.
    """
    names = ", ".join(fields)[:MOST_NAMED]
    if not names:
        return {}
    plain = "".join(letter for letter in names if letter.isascii() and letter.isprintable())
    logger.info("unknown fields are ignored: %s", plain)
    return {HEADER: plain}


def lacking(remedy: str, harmless: Callable[[Any], bool] = lambda value: not value) -> AfterValidator:
    """Marks a known field that asks for something unsupported.

    Args:
        remedy: What to do instead.
        harmless: Whether a value asks for nothing.
    """

    def check(value: Any) -> Any:
        if not harmless(value):
            raise PydanticCustomError("lacking", "is not supported; {remedy}", {"remedy": remedy})
        return value

    return AfterValidator(check)
