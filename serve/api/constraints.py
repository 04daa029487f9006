"""From ``response_format`` to what a completion may say."""

import asyncio
from collections.abc import Callable
from typing import Any

from medusa.engine.constraint import Constraint
from serve.api.errors import refused
from serve.api.protocol import ChatRequest, CompletionRequest
from serve.api.service import Service


async def constraint_of(
    service: Service, body: ChatRequest | CompletionRequest, schema: dict[str, Any] | None = None
) -> Callable[[], Constraint] | None:
    """Makes what each completion may say; None = anything.

    Args:
        service: Compiles grammars.
        body: Of a request.
        schema: What a tool makes of the answer, in place of a format.

    Raises:
        ApiError: The format is incomplete, or cannot be followed.
    """
    wanted = body.response_format
    if schema is None and (wanted is None or wanted.type == "text"):
        return None
    if body.ignore_eos:
        raise refused("ignore_eos does not go with a format: the answer ends where the format does", "ignore_eos")
    grammars, param = service.grammars, "response_format" if schema is None else "tools"
    try:
        if schema is not None:
            return await asyncio.to_thread(grammars.json_schema, schema)
        assert wanted is not None, "either of both"
        if wanted.type == "json_object":
            return await asyncio.to_thread(grammars.json_object)
        if wanted.type == "json_schema" and wanted.json_schema is not None:
            return await asyncio.to_thread(grammars.json_schema, wanted.json_schema.schema_)
        if wanted.type == "grammar" and wanted.grammar is not None:
            return await asyncio.to_thread(grammars.grammar, wanted.grammar)
    except (ValueError, TypeError, RecursionError) as error:
        raise refused(str(error) or "schema cannot be read; correct it", param) from error
    raise refused(f"response_format ({wanted.type}) is incomplete; give {wanted.type} beside its type", param)
