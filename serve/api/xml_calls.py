"""Tool calls with a tag for each argument, as Qwen 3.5, Qwen's coders and GLM 4.5 write them."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from medusa.serve.api.messages import Tool
from medusa.serve.api.tools import as_json

# No part of a pattern may stand for what the next one stands for: a model's text must not make it try again and again.
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>((?:(?!</function>).)*)(</function>)?\s*", re.DOTALL)
ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=|</parameter>).)*)</parameter>", re.DOTALL)
PAIR = re.compile(
    r"<arg_key>((?:(?!</?arg_key>).)*)</arg_key>\s*<arg_value>((?:(?!</?arg_value>).)*)</arg_value>\s*", re.DOTALL
)
NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|$)")


def read_call(text: str, tools: Sequence[Tool], whole: bool) -> tuple[str, str] | None:
    """Name and JSON arguments of a call, without the tags around it; None = it is no such call.

    Args:
        text: The text of the call.
        tools: The tools of the request.
        whole: Whether the tag behind the call has been written; without it some arguments may be missing.

    Raises:
        ValueError, TypeError, AttributeError, RecursionError: An argument or a schema cannot be read.
    """
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    if found := FUNCTION.fullmatch(text):
        name, given = found[1].strip(), ARGUMENT.findall(found[2])
        given = [(key, value.removesuffix("\n")) for key, value in given]
        whole = whole or bool(found[3])
    elif (head := NAME.match(text)) and head[1] in schemas and PAIR.sub("", text[head.end() :]) == "":
        name, given = head[1], PAIR.findall(text[head.end() :])
    else:
        return None
    properties = schemas.get(name, {}).get("properties") or {}
    return (name, as_json({key: _typed(value, properties.get(key) or {}) for key, value in given})) if whole else None


def _typed(text: str, schema: Any) -> Any:
    """A value by its schema: text, or JSON where text is not meant."""
    kinds = set(_kinds(schema))
    if text.strip() == "null" and "null" in kinds:
        return None
    if "string" in kinds or not kinds:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _kinds(schema: dict[str, Any]) -> Iterator[str]:
    """Types of the values that a schema allows."""
    told = schema.get("type", ())
    yield from [told] if isinstance(told, str) else told
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name, ()):
            yield from _kinds(each)
    for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())):
        yield "string" if isinstance(value, str) else "null" if value is None else "other"
    if "$ref" in schema or "allOf" in schema:
        yield "other"
