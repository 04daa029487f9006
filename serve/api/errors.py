"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import logging
import math
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from medusa.serve.models import UnknownModelError
from medusa.serve.request import BusyError, EngineError, LateError, StoppingError

logger = logging.getLogger(__name__)

REASONS = {
    "json_invalid": "body is not JSON; correct it",
    "extra_forbidden": "is not known; leave it out",
    "missing": "is missing; give it",
}
"""Messages for pydantic's kinds of errors whose own messages are unclear."""
UNIONS = (
    "str",
    "int",
    "float",
    "constrained-str",
    "Tool",
    "NamedTool",
    "AllowedChoice",
    "NamedTools",
    "FunctionTool",
    "OtherTool",
)
"""Names of types in pydantic's places of errors."""
FIELDS = {"prompt": "prompt"} | dict.fromkeys(("acceptance", "drafter", "nodes", "tree"), "speculation")
"""The field of a request by the first word of an error of the engine."""
TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """An error answer.

    Args:
        status: HTTP status.
        message: What is wrong, the rule, and the remedy.
        param: The field of the request that is wrong.
        code: A code for programs.
        retry_after: Seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """The body for the client."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = TYPES.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        if self.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.INTERNAL_SERVER_ERROR):
            headers["x-should-retry"] = "false"  # OpenAI's clients would retry on a server that is too slow
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def refused(message: str, param: str | None = None) -> ApiError:
    """An error for a request that cannot be served as it is."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param)


def too_long(context: int, what: str, param: str) -> ApiError:
    """An error for a request that exceeds the context. Clients check the code, and some the first words.

    Args:
        context: Context length in tokens.
        what: What needs more tokens.
        param: Its field.
    """
    message = f"This model's maximum context length is {context} tokens, but {what}; shorten the request"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, "context_length_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """Convert errors of the engine, of its models and of FastAPI to errors for clients."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case BusyError():
            return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error), code="queue_full", retry_after=error.retry_after)
        case LateError():
            return ApiError(HTTPStatus.REQUEST_TIMEOUT, str(error), "timeout", "timeout")
        case StoppingError():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="stopping", retry_after=1)
        case EngineError():
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), code="engine")
        case UnknownModelError():
            return ApiError(HTTPStatus.NOT_FOUND, str(error.args[0]), "model", "model_not_found")
        case RequestValidationError():
            # Of a union only the intended type counts: one whose types are right, or the one that fits deepest.
            wrong = max(error.errors(), key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
            if wrong["loc"] == ("body",) and wrong["type"] in ("missing", "model_attributes_type"):
                return refused("body is not a JSON object; send one, with the header Content-Type: application/json")
            place = "" if wrong["type"] == "json_invalid" else _place(wrong["loc"])
            message = REASONS.get(wrong["type"], wrong["msg"])
            if {"int_type", "float_type"} <= {
                one["type"] for one in error.errors() if one["loc"][:2] == wrong["loc"][:2]
            }:
                message = "Input should be a number"
            return refused(f"{place}: {message}" if place else message, place or None)
        case ValueError():
            return refused(str(error), FIELDS.get(re.split(r"\W", str(error), maxsplit=1)[0]))
    logger.error("internal error", exc_info=error)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")


def _place(parts: Sequence[str | int]) -> str:
    """The path of a field in a body, without the names of types."""
    return ".".join(str(part) for part in parts[1:] if part not in UNIONS and "[" not in str(part))


def handle_errors(app: FastAPI) -> None:
    """Let the application return all errors in OpenAI's format."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    engine = (BusyError, LateError, StoppingError, EngineError, UnknownModelError)
    for kind in (*engine, ApiError, RequestValidationError, HTTPException, ValueError, Exception):
        app.add_exception_handler(kind, answer)
