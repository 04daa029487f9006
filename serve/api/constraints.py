"""Converts ``response_format`` and tools to constraints of completions."""

from collections.abc import Callable
from typing import Any

from medusa.serve.api.errors import refused
from medusa.serve.api.messages import ResponseFormat
from medusa.serve.api.protocol import ChatRequest, CompletionRequest
from medusa.serve.api.reasoning import Writing
from medusa.serve.api.service import Service
from medusa.serve.api.tools import Calls, json_form, parameters
from medusa.serve.grammar import Following, Grammars, check_grammar
from medusa.serve.threads import Threads

Made = Callable[[], Following]
COMPILING, MOST_SECONDS = 4, 30.0
"""Grammars that are compiled at a time, and seconds until one is refused."""


async def constraint_of(
    service: Service,
    body: ChatRequest | CompletionRequest,
    calls: Calls | None = None,
    writing: Writing | None = None,
    prompt: str = "",
) -> Made | None:
    """A function that makes the constraint of a completion; None = no constraint.

    Args:
        service: Compiles grammars.
        body: The body of the request.
        calls: The rules for tool calls.
        writing: How the model writes answers of a chat.
        prompt: The end of the prompt.

    Raises:
        ApiError: The format is incomplete or not supported.
    """
    calls = calls or Calls()
    try:
        wanted = body.form()
    except (ValueError, RecursionError) as error:
        raise refused(str(error) or "schema cannot be read; correct it", "structured_outputs") from error
    if wanted is None and not calls.required and not calls.strict:
        return None
    if body.ignore_eos:
        raise refused("ignore_eos cannot be combined with a format, which ends the answer; leave it out", "ignore_eos")
    try:
        return await _threads.run(
            lambda: _compiled(service.grammars, wanted, calls, writing or Writing(), prompt), MOST_SECONDS
        )
    except TimeoutError:
        raise refused("grammar or schema takes too long to compile; make it simpler", "response_format") from None
    except (ValueError, TypeError, RecursionError) as error:
        message = str(error) or "schema cannot be read; correct it"
        raise refused(message, "tools" if calls.tools else "response_format") from error


_threads = Threads(COMPILING)


def _compiled(grammars: Grammars, wanted: ResponseFormat | None, calls: Calls, writing: Writing, prompt: str) -> Made:
    forms, schemas = list[dict[str, Any]](), list[dict[str, Any]]()
    if wanted is not None and not calls.required:
        form, schemas = _structure(wanted)
        forms.append(writing.whole(form, prompt))
    if calls.name and not writing.harmony:
        schemas = [parameters(tool) for tool in calls.tools if tool.function.name == calls.name][:1]
        forms.append(writing.whole(json_form(schemas[0]), prompt))
    elif calls.required or (calls.tools and forms):
        forms.append(writing.whole(writing.calls(calls, free=False), prompt, calls=True))
        schemas += calls.schemas
    if not forms:
        return grammars.structure(writing.calls(calls, free=True), calls.schemas, free=True)
    if len(forms) == 1 and forms[0]["type"] == "json_schema":
        return grammars.json_schema(schemas[0])
    if len(forms) == 1 and forms[0]["type"] == "grammar":
        return grammars.grammar(forms[0]["grammar"])
    whole = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
    free = wanted is not None and wanted.type in ("grammar", "regex")
    return grammars.structure(whole, schemas, free=free)


def _schema(wanted: ResponseFormat) -> dict[str, Any]:
    """The schema of a format.

    Raises:
        ValueError: The format is incomplete.
    """
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        missing = {"grammar": "grammar", "regex": "pattern"}.get(wanted.type, "schema")
        raise ValueError(f"response_format ({wanted.type}) is incomplete; give its {missing}")
    return wanted.json_schema.schema_


def _structure(wanted: ResponseFormat) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A format in XGrammar's language of structural tags, and the schemas in it."""
    if wanted.type == "grammar" and wanted.grammar is not None:
        check_grammar(wanted.grammar)
        return {"type": "grammar", "grammar": wanted.grammar}, []
    if wanted.type == "regex" and wanted.pattern is not None:
        check_grammar(wanted.pattern)
        return {"type": "regex", "pattern": wanted.pattern}, []
    schema = _schema(wanted)
    return json_form(schema), [schema]
