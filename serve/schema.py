"""Checks that a JSON schema is supported."""

from collections.abc import Iterator
from typing import Any

MOST_PATTERN, DEEPEST_PATTERN, DEEPEST = 2048, 32, 32
"""Limits for characters of a regular expression, its brackets, and nested schemas, since XGrammar is recursive."""

KEYWORDS = frozenset(
    "type properties required additionalProperties unevaluatedProperties patternProperties propertyNames minProperties"
    " maxProperties items prefixItems unevaluatedItems minItems maxItems minLength maxLength pattern format minimum"
    " maximum exclusiveMinimum exclusiveMaximum multipleOf enum const anyOf oneOf allOf $ref $defs definitions title"
    " description default examples example $schema $id $comment deprecated readOnly writeOnly".split()
)
"""Keywords that are enforced, or have no effect on the text; XGrammar ignores all others."""
FORMATS = frozenset(
    "date time date-time duration email hostname ipv4 ipv6 uri uri-reference uri-template uuid json-pointer"
    " relative-json-pointer".split()
)
SCHEMAS = ("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "unevaluatedItems")
"""Keywords whose value is a schema."""
MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose value is a list of schemas."""


def check_schema(schema: Any, place: str, depth: int = 0) -> None:
    """Check that no part of a schema would be ignored or is too large.

    Raises:
        ValueError: A part is not supported.
    """
    if not isinstance(schema, dict):
        return
    if depth > DEEPEST:
        raise ValueError(f"schema is nested more than {DEEPEST} times; make it flatter")
    problem = next(_problems(schema), None)
    if problem:
        raise ValueError(f"{place}: {problem}; leave it out")
    for name, value in schema.items():
        if name in SCHEMAS:
            check_schema(value, f"{place}.{name}", depth + 1)
        elif name in MAPS and isinstance(value, dict):
            for key, inner in value.items():
                check_schema(inner, f"{place}.{name}.{key}", depth + 1)
        elif name in LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                check_schema(inner, f"{place}.{name}.{index}", depth + 1)


def _problems(schema: dict[str, Any]) -> Iterator[str]:
    """Unsupported parts of one schema."""
    lengths = {"minLength", "maxLength"} & schema.keys()
    for name in sorted(schema.keys() - KEYWORDS):
        yield f"keyword ({name}) is not supported"
    for pattern in [schema.get("pattern"), *_names(schema.get("patternProperties"))]:
        if isinstance(pattern, str) and (len(pattern) > MOST_PATTERN or pattern.count("(") > DEEPEST_PATTERN):
            yield f"pattern has more than {MOST_PATTERN} characters or {DEEPEST_PATTERN} brackets"
    if "format" in schema and str(schema["format"]) not in FORMATS:
        yield f"format ({schema['format']}) is not supported"
    if lengths and ("pattern" in schema or "format" in schema):
        yield f"{min(lengths)} is not supported beside a pattern or format"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf is supported for integers only"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf of several schemas is not supported"
    if "patternProperties" in schema and "propertyNames" in schema:
        yield "propertyNames is not supported beside patternProperties"


def _names(value: Any) -> Iterator[str]:
    """Keys of a mapping; none for other values."""
    return iter(value if isinstance(value, dict) else ())
