"""One streamed request, and the arrival times of its chunks; cheap, because the server needs the same cores."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import httpx

EXCERPT = 200
"""Most characters of a server's message in an error."""


class Asking(NamedTuple):
    """The common part of all requests to a server."""

    url: str
    """Address of the API, including /v1."""
    model: str
    temperature: float = 0.0
    continuous_usage: bool = False
    """Request the number of tokens so far in every chunk, with a field that vLLM introduced."""
    more: Mapping[str, Any] = {}
    """Additional fields of the body."""
    key: str = ""
    timeout: float = 600.0
    """Seconds without a byte after which a request fails."""


@dataclass
class Answer:
    """An answer; times are those of ``time.monotonic``."""

    asked: float
    times: list[float] = field(default_factory=list)
    """Arrival time of each chunk with text; the time of the end if no chunk has text."""
    told: list[int] = field(default_factory=list)
    """Number of tokens so far at each chunk, if the server reports it."""
    tokens: int | None = None
    """Number of tokens of the completion, as the server reports it at the end; None = not reported."""
    ended: float = 0.0
    finished: bool = False
    """Whether the server has sent a finish reason."""
    error: str | None = None
    """Why the answer is incomplete."""

    @property
    def count(self) -> int:
        """Number of tokens of the completion; if the server does not report it, the number of chunks."""
        return len(self.times) if self.tokens is None else self.tokens

    @property
    def counted(self) -> bool:
        """Whether the server has reported the number of tokens of each chunk."""
        return bool(self.told) and len(self.told) == len(self.times)

    def shares(self) -> list[float]:
        """Tokens of each chunk: as reported, with the rest in the last chunk; otherwise all equal."""
        if not self.counted:
            return [self.count / len(self.times)] * len(self.times)
        until = [*self.told[:-1], max(self.told[-1], self.count)]
        return [float(b - a) for a, b in zip([0, *until], until, strict=False)]

    def add(self, data: str, now: float) -> None:
        """Add the data of one event.

        Raises:
            ValueError: The data are an error, or not a chunk of an answer.
        """
        if data == "[DONE]":
            return
        body = json.loads(data)
        if "error" in body:
            raise ValueError(f"error in the stream: {json.dumps(body['error'])[:EXCERPT]}")
        usage = body.get("usage")
        if usage:
            self.tokens = usage["completion_tokens"]
        for choice in body["choices"]:
            delta = choice["delta"]
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                self.times.append(now)
                if usage:
                    self.told.append(usage["completion_tokens"])
            self.finished |= bool(choice.get("finish_reason"))


class Client:
    """Connections to one server, one for each concurrent request."""

    def __init__(self, asking: Asking) -> None:
        self._url = f"{asking.url.rstrip('/')}/chat/completions"
        usage = {"include_usage": True} | ({"continuous_usage_stats": True} if asking.continuous_usage else {})
        self._body = {
            "model": asking.model, "temperature": asking.temperature, "stream": True, "stream_options": usage,
        } | dict(asking.more)  # fmt: skip
        self._http = httpx.AsyncClient(
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {asking.key}"} if asking.key else {}),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=asking.timeout,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: str, max_tokens: int) -> Answer:
        """Request one completion; errors are stored in the answer."""
        messages = [{"role": "user", "content": prompt}]
        body = json.dumps(self._body | {"messages": messages, "max_tokens": max_tokens})
        answer = Answer(time.monotonic())
        try:
            await self._read(body, answer)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            answer.error = str(error) if isinstance(error, ValueError) else f"not a chunk of an answer: {error!r}"
        answer.ended = time.monotonic()
        if not answer.times:  # it has no text
            answer.times, answer.told = [answer.ended], [] if answer.tokens is None else [answer.tokens]
        return answer

    async def _read(self, body: str, answer: Answer) -> None:
        async with self._http.stream("POST", self._url, content=body) as response:
            if response.status_code != HTTPStatus.OK:
                text = (await response.aread()).decode(errors="replace")
                raise ValueError(f"status {response.status_code}: {text[:EXCERPT]}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    answer.add(line[5:].strip(), time.monotonic())
        if not answer.finished:
            raise ValueError("the stream ended before the answer")


def first_model(url: str, key: str = "") -> str:
    """The first model in a server's list.

    Raises:
        RuntimeError: The server cannot be reached, or has no model.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=30, trust_env=False)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise RuntimeError(
            f"server ({url}) does not name its models: {error}; start it, give its address up to /v1, or name the"
            " model with --model"
        ) from error
