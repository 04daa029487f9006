"""Checks that a JSON schema is supported: XGrammar would ignore what it does not know."""

import re
from collections.abc import Iterator
from typing import Any

MOST_PATTERN, DEEPEST_PATTERN, DEEPEST = 2048, 32, 32
"""Limits for characters of a regular expression, its brackets, and nested schemas, since XGrammar is recursive."""
MOST_OPTIONAL = 64
"""Most signs that make a part optional or repeat it, in a regular expression or a rule; hundreds take minutes."""

NOTES = frozenset(
    "title description default examples example $schema $id $comment deprecated readOnly writeOnly $defs"
    " definitions".split()
)
"""Keywords that have no effect on the text."""
KEYWORDS = NOTES | frozenset(
    "type properties required additionalProperties unevaluatedProperties patternProperties propertyNames minProperties"
    " maxProperties items prefixItems unevaluatedItems minItems maxItems minLength maxLength pattern format minimum"
    " maximum exclusiveMinimum exclusiveMaximum multipleOf enum const anyOf oneOf allOf $ref".split()
)
"""Those, and keywords that are enforced."""
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords beside which others are not enforced."""
LOWER, UPPER = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
LENGTHS = {"minLength", "maxLength"}
SIZES = {*LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties"}
TYPED = {*LOWER, *UPPER, *SIZES, "multipleOf", "pattern", "format"}
"""Keywords that are enforced only beside a type."""
UNWRITTEN = re.compile(r"""["\x00-\x1f]|\\(?:\\|[nrtfv0c]|(?:x|u00)(?:[01]|22|5[cC]))""")
"""Parts of a pattern that JSON writes with an escape; XGrammar would write them as they are."""
NEGATED = re.compile(r"\[\^(?:\\.|[^\]])*\]")
"""A class of all other characters; XGrammar leaves those out of it."""
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
    keys, lengths = schema.keys() - NOTES, LENGTHS & schema.keys()
    for name in sorted(schema.keys() - KEYWORDS):
        yield f"keyword ({name}) is not supported"
    for pattern in [schema.get("pattern"), *_names(schema.get("patternProperties"))]:
        if not isinstance(pattern, str):
            continue
        if len(pattern) > MOST_PATTERN or pattern.count("(") > DEEPEST_PATTERN:
            yield f"pattern has more than {MOST_PATTERN} characters or {DEEPEST_PATTERN} brackets"
        if optional(pattern) > MOST_OPTIONAL:
            yield f"pattern has more than {MOST_OPTIONAL} optional or repeated parts"
        if found := UNWRITTEN.search(NEGATED.sub("", pattern)):
            yield f"pattern with quotes, backslashes or control characters ({found[0]!r}) is not supported"
    if "format" in schema and str(schema["format"]) not in FORMATS:
        yield f"format ({schema['format']}) is not supported"
    if lengths and ("pattern" in schema or "format" in schema):
        yield f"{min(lengths)} is not supported beside a pattern or format"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf is supported for integers only"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf of several schemas is not supported"
    if "propertyNames" in schema and keys & {"properties", "patternProperties"}:
        yield "propertyNames is not supported beside properties or patternProperties"
    yield from _unenforced(schema, keys)


def _unenforced(schema: dict[str, Any], keys: set[str]) -> Iterator[str]:
    """Keywords that are enforced elsewhere, but not in this schema."""
    if "$ref" in schema and not str(schema["$ref"]).startswith("#"):
        yield f"$ref ({schema['$ref']}) is not within the schema, which is not supported"
    for name in ALONE:
        others, parts = keys - {name} - ({"type"} if name != "$ref" else set()), schema.get(name)
        if name in schema and others:
            yield f"{min(others)} is not supported beside {name}"
        if name in ("anyOf", "oneOf", "allOf") and isinstance(parts, list):
            if not parts:
                yield f"{name} of nothing is not supported"
            if "type" in schema and any(
                not isinstance(one, dict) or one.get("type") != schema["type"] for one in parts
            ):
                yield f"type is not supported beside {name} of other types"
    if "type" in schema and keys & {"const", "enum"} and not _is_of_type(schema):
        yield "type is not supported beside values of another type"
    if "type" not in schema and (untyped := keys & TYPED):
        yield f"{min(untyped)} is not supported without a type"
    step = schema.get("multipleOf", 1)
    if "multipleOf" in keys and bool(keys & LOWER) != bool(keys & UPPER):
        yield "multipleOf is not supported beside one bound alone"
    if not isinstance(step, int | float) or step % 1:
        yield f"multipleOf ({step}) is not a whole number, which is not supported"
    if any(isinstance(schema.get(name), int | float) and schema[name] < 0 for name in SIZES):
        yield "a negative length is not supported"
    properties = set(_names(schema.get("properties")))
    required = schema.get("required")
    if isinstance(required, list) and (missing := {str(name) for name in required} - properties):
        yield f"required ({min(missing)}) is not supported without its schema in properties"
    if properties and "patternProperties" in keys:
        yield "patternProperties is not supported beside properties"


def optional(text: str) -> int:
    """Number of signs in a regular expression or a rule that make a part optional or repeat it."""
    return sum(map(text.count, "?*+{"))


def _is_of_type(schema: dict[str, Any]) -> bool:
    """Whether all values that a schema lists are of its type."""
    names = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    values = [schema["const"]] if "const" in schema else schema["enum"]

    def fits(value: Any) -> bool:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return "number" in kinds or ("integer" in kinds and value % 1 == 0)
        return names[type(value)] in kinds

    return not isinstance(values, list) or all(map(fits, values))


def _names(value: Any) -> Iterator[str]:
    """Keys of a mapping; none for other values."""
    return iter(value if isinstance(value, dict) else ())
