"""Access control: API keys, the admin key, and the size of bodies."""

import hmac
import json
import logging
import time
from contextlib import suppress
from http import HTTPStatus
from uuid import uuid4

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa.serve.api.errors import ApiError, refused
from medusa.serve.settings import ApiSettings

logger = logging.getLogger("medusa.serve.requests")


def bearer(request: Request) -> str:
    """The token of the Authorization header; empty if there is none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def check_key(request: Request, settings: ApiSettings) -> str:
    """Check the API key of a request and return it; it may be empty if no keys are set.

    Raises:
        ApiError: The key is missing or wrong.
    """
    token = bearer(request)
    if settings.api_keys and not any(_same(token, key) for key in settings.api_keys):
        message = "API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
    return token


def check_admin(request: Request, settings: ApiSettings) -> None:
    """Check that a request has the admin key.

    Raises:
        ApiError: The key is missing or wrong, or no admin key is set.
    """
    if not settings.admin_key:
        message = "heads cannot be changed at run time without an admin key, and replicas never have one"
        raise ApiError(HTTPStatus.FORBIDDEN, message)
    if not _same(bearer(request), settings.admin_key):
        raise ApiError(HTTPStatus.UNAUTHORIZED, "admin key is missing or wrong", code="invalid_api_key")


async def check_text(request: Request) -> None:
    """Check that a body's texts have whole characters: JSON can hold halves of them, which tokenizers cannot read.

    Raises:
        ApiError: There is half of a character, or a number that is none, or the body is not in UTF-8.
    """
    body = await request.body()
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise refused(f"body is not in UTF-8 ({error.reason} at byte {error.start}); send UTF-8") from error
    if b"NaN" in body or b"Infinity" in body:
        with suppress(json.JSONDecodeError, RecursionError):
            json.loads(body, parse_constant=_no_number)
    if rb"\ud" in body.lower():
        with suppress(json.JSONDecodeError, RecursionError):  # FastAPI refuses the former, and reads the latter or not
            try:
                json.dumps(await request.json(), ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise refused("body holds half of a character (a lone surrogate); send whole ones") from error


def _no_number(text: str) -> None:
    raise refused(f"body holds {text}, which JSON does not know; send a number or null")


def _same(ours: str, theirs: str) -> bool:
    return hmac.compare_digest(ours.encode(), theirs.encode())


class Limits:
    """ASGI middleware: bodies have a limit (status 413), and every request an id and a line in the log.

    Args:
        app: The application.
        max_body: Most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app, self._max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, read = time.monotonic(), 0, 0
        name = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")[:128] or uuid4().hex

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                detail = f"body exceeds the limit ({self._max_body} bytes); send less"
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
            return message

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name.encode("latin-1"))]
            await send(message)

        try:
            await self._app(scope, counted, named)
        finally:
            if scope["path"] not in ("/health", "/metrics"):
                seconds = time.monotonic() - began
                place = f"{scope['method']} {scope['path']}"
                logger.info("id=%r request=%r status=%d seconds=%.3f", name, place, status, seconds)
