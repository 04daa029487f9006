"""Errors as OpenAI gives them: {"error": {"message", "type", "param", "code"}}."""

import logging
import math
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
"""What pydantic's kinds of errors mean, where its own words do not say it."""
TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than what was asked for.

    Args:
        status: HTTP status.
        message: What is wrong, the rule, and the remedy.
        param: The field of the request that is wrong.
        code: A word for programs.
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
        """What the client gets."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = TYPES.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The same as a response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        if self.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.INTERNAL_SERVER_ERROR):
            headers["x-should-retry"] = "false"  # OpenAI's clients would ask again, of a server that is too slow
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def refused(message: str, param: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param)


def too_long(context: int, what: str, param: str) -> ApiError:
    """A request that does not fit into the context. Clients look for the code, and some for the first words.

    Args:
        context: Tokens that there is room for.
        what: What takes more.
        param: Where it stands.
    """
    message = f"This model's maximum context length is {context} tokens, but {what}; shorten the request"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, "context_length_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """What errors of the engine, of its models and of FastAPI mean to a client."""
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
            wrong = max(error.errors(), key=lambda one: len(one["loc"]))  # what can be several things was meant as one
            place = "" if wrong["type"] == "json_invalid" else _place(wrong["loc"])
            message = REASONS.get(wrong["type"], wrong["msg"])
            return refused(f"{place}: {message}" if place else message, place or None)
        case ValueError():
            return refused(str(error))
    logger.error("internal error", exc_info=error)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")


def _place(parts: Sequence[str | int]) -> str:
    """Where in a body something stands, without the names of types."""
    return ".".join(str(part) for part in parts[1:] if part not in ("str", "int", "float") and "[" not in str(part))


def handle_errors(app: FastAPI) -> None:
    """Let every error of this application leave in OpenAI's form."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (ApiError, UnknownModelError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
