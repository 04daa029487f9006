"""Tool calls as Qwen 3.5 and Qwen's coders write them: a tag for the function, and one for each argument."""

import json
import re
from collections.abc import Sequence
from typing import Any

from medusa.serve.api.messages import Tool

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
OTHERS = {"anyOf", "oneOf", "allOf", "enum", "const", "$ref"}
"""Keywords of schemas that say what a value is without a type."""


def read_call(text: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
    """Name and JSON arguments of a whole call, without the tags around it; None = it is no such call."""
    found = FUNCTION.fullmatch(text)
    if found is None:
        return None
    name = found[1].strip()
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    types = schemas.get(name, {}).get("properties", {})
    arguments = {key: _typed(value, types.get(key, {})) for key, value in ARGUMENT.findall(found[2])}
    return name, json.dumps(arguments, ensure_ascii=False)


def _typed(text: str, schema: Any) -> Any:
    """A value by its schema: text, or JSON where that is possible and text is not meant."""
    kinds = schema.get("type", ()) if isinstance(schema, dict) else ()
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if "string" in kinds or not (kinds or (isinstance(schema, dict) and schema.keys() & OTHERS)):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
