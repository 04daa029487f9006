"""Converts ``response_format`` and tools to constraints of completions."""

from collections.abc import Callable
from typing import Any

from medusa.engine.constraint import Constraint
from medusa.serve.api.errors import refused
from medusa.serve.api.messages import ResponseFormat
from medusa.serve.api.protocol import ChatRequest, CompletionRequest
from medusa.serve.api.service import Service
from medusa.serve.api.tools import Calls, parameters
from medusa.serve.grammar import MOST_SPACES, Grammars, check_grammar
from medusa.serve.threads import Threads

Made = Callable[[], Constraint]
COMPILING, MOST_SECONDS = 4, 30.0
"""Grammars that are compiled at a time, and seconds until one is refused."""


async def constraint_of(
    service: Service, body: ChatRequest | CompletionRequest, calls: Calls | None = None
) -> Made | None:
    """A function that makes the constraint of a completion; None = no constraint.

    Args:
        service: Compiles grammars.
        body: The body of the request.
        calls: The rules for tool calls.

    Raises:
        ApiError: The format is incomplete or not supported.
    """
    calls, wanted = calls or Calls(), body.response_format
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is None and not calls.required and not calls.strict:
        return None
    if body.ignore_eos:
        raise refused("ignore_eos cannot be combined with a format, which ends the answer; leave it out", "ignore_eos")
    try:
        return await _threads.run(lambda: _compiled(service.grammars, wanted, calls), MOST_SECONDS)
    except TimeoutError:
        raise refused("grammar or schema takes too long to compile; make it simpler", "response_format") from None
    except (ValueError, TypeError, RecursionError) as error:
        message = str(error) or "schema cannot be read; correct it"
        raise refused(message, "tools" if calls.tools else "response_format") from error


_threads = Threads(COMPILING)


def _compiled(grammars: Grammars, wanted: ResponseFormat | None, calls: Calls) -> Made:
    if calls.name:
        (named,) = [tool for tool in calls.tools if tool.function.name == calls.name][:1]
        return grammars.json_schema(parameters(named))
    if calls.required:
        return grammars.structure(calls.structure(free=False), calls.schemas, free=False)
    if wanted is None:
        return grammars.structure(calls.structure(free=True), calls.schemas, free=True)
    if calls.tools:  # the format, or a call
        form, schemas = _structure(wanted)
        either = {"type": "or", "elements": [form, calls.structure(free=False)]}
        return grammars.structure(either, [*schemas, *calls.schemas], free=wanted.type == "grammar")
    if wanted.type == "grammar" and wanted.grammar is not None:
        return grammars.grammar(wanted.grammar)
    return grammars.json_schema(_schema(wanted))


def _schema(wanted: ResponseFormat) -> dict[str, Any]:
    """The schema of a format.

    Raises:
        ValueError: The format is incomplete.
    """
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        missing = "grammar" if wanted.type == "grammar" else "schema"
        raise ValueError(f"response_format ({wanted.type}) is incomplete; give its {missing}")
    return wanted.json_schema.schema_


def _structure(wanted: ResponseFormat) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A format in XGrammar's language of structural tags, and the schemas in it."""
    if wanted.type == "grammar" and wanted.grammar is not None:
        check_grammar(wanted.grammar)
        return {"type": "grammar", "grammar": wanted.grammar}, []
    schema = _schema(wanted)
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_SPACES}, [schema]
