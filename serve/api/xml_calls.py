"""Tool calls with a tag for each argument, as Qwen 3.5, Qwen's coders and GLM 4.5 write them."""

import json
import re
from collections.abc import Sequence
from typing import Any

from medusa.serve.api.messages import Tool

PAIRS = re.compile(r"\s*([\w.-]+)\s*((?:<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>\s*)*)", re.DOTALL)
PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
OTHERS = {"anyOf", "oneOf", "allOf", "enum", "const", "$ref"}
"""Keywords of schemas that say what a value is without a type."""


def read_call(text: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
    """Name and JSON arguments of a whole call, without the tags around it; None = it is no such call."""
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    found, each = FUNCTION.fullmatch(text), ARGUMENT
    if found is None:
        found, each = PAIRS.fullmatch(text), PAIR
        if found is None or found[1] not in schemas:
            return None
    name = found[1].strip()
    types = schemas.get(name, {}).get("properties", {})
    arguments = {key: _typed(value, types.get(key, {})) for key, value in each.findall(found[2])}
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
