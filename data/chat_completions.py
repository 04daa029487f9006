"""A client of OpenAI-compatible chat completions that retries if the server is busy or restarts."""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import httpx

from medusa.data.exchange import EndpointSettings, Message, Settings, UnansweredError
from medusa.data.shapes import visible

logger = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
"""Longest wait between tries in seconds; a server may ask for more."""
CONNECT_TIMEOUT = 30.0
"""Time limit for connecting, in seconds."""
GIVE_UP_AFTER = 16
"""Number of successive prompts that fail after all retries, after which the server counts as down."""

EXACT = "return_token_ids"
"""Field that makes vLLM return the exact tokens that the base read and wrote."""
ENDED = ("stop", "eos_token")
"""Finish reasons if the base itself ended its answer; with others (limit, filter, abort) the answer was cut off."""
PROMPT_REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)


class EndpointError(ValueError):
    """The server cannot answer any prompt."""


class _BusyError(Exception):
    """The server was busy or failed; it may ask for a pause in seconds."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class Completion(NamedTuple):
    """The answer of the server."""

    text: str
    cut: bool
    """Whether the server ended it (usually by a limit on tokens) and not the base."""
    prompt_ids: list[int]
    """Tokens that the base read; empty, like ``ids``, if the server does not return them."""
    ids: list[int]
    """Tokens that the base wrote."""


class ChatClient:
    """A client for one model of one server; an asynchronous context.

    Args:
        url: Address of the API, including its version: "http://localhost:8000/v1".
        model: The server's name of the base.
        settings: How answers are generated.
        endpoint: Concurrency, retries and time limit.
        key: API key, sent as a bearer token.
        first_wait: Seconds before the first retry; each further wait is twice as long.
        longest_pause: Longest wait in seconds if the server asks for a pause; then the request is tried again.

    Raises:
        ValueError: The address is not an http(s) address.
    """

    def __init__(
        self,
        url: str,
        model: str,
        settings: Settings,
        endpoint: EndpointSettings,
        key: str | None,
        first_wait: float = 1.0,
        longest_pause: float = 600.0,
    ) -> None:
        if not _is_address(url):
            raise ValueError(f"endpoint ({url}) is not an address; give one like http://localhost:8000/v1")
        self._name, self._url = f"endpoint ({url}, model {model})", f"{url.rstrip('/')}/chat/completions"
        self._tries, self._first_wait, self._longest_pause = endpoint.retries + 1, first_wait, longest_pause
        self._request = {
            "model": model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            EXACT: True,
        }
        self._reached, self._answered, self._failures, self._warned = False, False, 0, False
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None),  # the caller limits the number of concurrent requests
            timeout=httpx.Timeout(endpoint.timeout, connect=min(endpoint.timeout, CONNECT_TIMEOUT)),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(self, messages: Sequence[Message], seed: int) -> Completion:
        """Answer a conversation; retries if the server is busy.

        Raises:
            UnansweredError: The server refuses this conversation, or was busy or failed at every try.
            EndpointError: The server cannot be reached, refuses the key, does not have the model, or is down.
        """
        reason = ""
        for tried in range(self._tries):
            try:
                completion = await self._try({**self._request, "messages": messages, "seed": seed})
            except _BusyError as error:
                reason = str(error)
                if tried + 1 < self._tries:
                    await asyncio.sleep(_wait(self._first_wait, tried, self._bounded(error.pause)))
            else:
                self._failures = 0
                return completion
        self._failures += 1
        if self._failures >= GIVE_UP_AFTER:
            raise EndpointError(f"{self._name} failed {self._failures} prompts in a row, at last: {reason}; look there")
        raise UnansweredError(f"{self._name} failed {self._tries} times, at last: {reason}")

    def _bounded(self, pause: float | None) -> float | None:
        """The pause that a server asks for, up to the longest; the first longer one is logged."""
        longest = self._longest_pause
        if pause is None or pause <= longest:
            return pause
        if not self._warned:
            logger.warning("%s asks to wait %.0f s; it is asked again after %.0f", self._name, pause, longest)
            self._warned = True
        return longest

    async def _try(self, request: Mapping[str, Any]) -> Completion:
        try:
            response = await self._http.post(self._url, json=request)
        except httpx.RequestError as error:
            if not self._reached and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise EndpointError(
                    f"{self._name} cannot be reached ({_reason(error)}); start the server, or correct the address"
                ) from error
            raise _BusyError(_reason(error)) from error
        self._reached = True
        if response.status_code == HTTPStatus.OK:
            completion = self._completion(response)
            self._answered = True
            return completion
        if response.status_code in PROMPT_REFUSED and EXACT in response.text and EXACT in request:
            self._request.pop(EXACT, None)  # a strict server without this field
            return await self._try({name: value for name, value in request.items() if name != EXACT})
        raise self._failure(response)

    def _failure(self, response: httpx.Response) -> Exception:
        """The error for an answer with another status than 200."""
        status = response.status_code
        message = f"{status} {response.reason_phrase}: {_excerpt(response.text)}"
        if status in PROMPT_REFUSED:
            return UnansweredError(f"{self._name} refused it: {message}")
        if status in BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return _BusyError(message, _retry_after(response))
        remedy = "give the address up to /v1, and --model as the server names it (GET /v1/models)"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            remedy = "name the environment variable that holds its key with --api-key-env"
        return EndpointError(f"{self._name} says {message}; {remedy}")

    def _completion(self, response: httpx.Response) -> Completion:
        try:
            body = response.json()
            choice = body["choices"][0]
            message, cut = choice["message"], choice.get("finish_reason") not in ENDED
            text, ids, prompt_ids = message.get("content") or "", choice.get("token_ids"), body.get("prompt_token_ids")
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            tokens = (ids or []) + (prompt_ids or [])
            if not isinstance(text, str) or not all(isinstance(token, int) for token in tokens):
                raise TypeError("text or token ids of another type")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            told = f"sent no chat completion ({_excerpt(response.text)})"
            if self._answered:  # as some gateways do while what is behind them is down
                raise _BusyError(told) from None
            raise EndpointError(f"{self._name} {told}; give the address up to /v1") from None
        if ids and prompt_ids:
            return Completion(text, cut, prompt_ids, ids)
        if reasoning:
            raise EndpointError(
                f"{self._name} splits the reasoning from its answer and returns no token ids, so the base's own text"
                " is unknown; start the server without a reasoning parser"
            )
        return Completion(text, cut, [], [])


def _is_address(url: str) -> bool:
    try:
        return httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        return False


def _wait(first: float, tried: int, pause: float | None) -> float:
    """Seconds until the next try, randomised so that requests that failed together are not retried together."""
    backoff = min(LONGEST_WAIT, first * 2**tried) / 2
    return (backoff if pause is None else pause) + random.uniform(0, backoff)


def _retry_after(response: httpx.Response) -> float | None:
    """The pause in seconds that the server asks for, as a number or a date."""
    value = response.headers.get("retry-after", "")
    try:
        if value.strip().isdigit():
            return float(value)
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _excerpt(text: str) -> str:
    """The start of a server's text, on one line."""
    line = visible(" ".join(text.split()))
    return line if len(line) <= 200 else f"{line[:197]}..."
