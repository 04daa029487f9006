"""What all bodies of requests have in common: fields that nobody knows are left alone, and named in the answer."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Fields"
MOST_NAMED = 512
"""Characters of names in a header."""


class Body(BaseModel):
    """A part of a request. Fields that ask for nothing (null) count as left out."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send back answers with all their empty fields; a required one is missing then."""
        if not isinstance(value, dict):
            return value
        return {name: inner for name, inner in value.items() if inner is not None}


class StrictBody(Body):
    """One whose fields nobody else has: an unknown one is a mistake."""

    model_config = ConfigDict(extra="forbid")


def ignored(value: Any, place: str = "") -> Iterator[str]:
    """Names of the fields of a body that nobody knows."""
    if isinstance(value, Body):
        yield from (f"{place}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from ignored(getattr(value, name), f"{place}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], Body):
        for index, inner in enumerate(value):
            yield from ignored(inner, f"{place}{index}.")


def named(fields: Iterable[str]) -> dict[str, str]:
    """The header that says which fields were ignored, which the log says too.

    Names come from outside: what no header may hold is left out of them.
    """
    names = ", ".join(fields)[:MOST_NAMED]
    if not names:
        return {}
    plain = "".join(letter for letter in names if letter.isascii() and letter.isprintable())
    logger.info("unknown fields are ignored: %s", plain)
    return {HEADER: plain}


def lacking(remedy: str, harmless: Callable[[Any], bool] = lambda value: not value) -> AfterValidator:
    """Marks a field that is known, and asks for what is not there.

    Args:
        remedy: What to do.
        harmless: Values that ask for nothing.
    """

    def check(value: Any) -> Any:
        if not harmless(value):
            raise PydanticCustomError("lacking", "is not supported; {remedy}", {"remedy": remedy})
        return value

    return AfterValidator(check)
