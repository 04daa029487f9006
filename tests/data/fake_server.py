"""An OpenAI-compatible server in a thread: answers every conversation with its last message, backwards."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.local_server import Handler, Server

Reply = tuple[int, dict[str, str], Any]


def backwards(request: dict[str, Any]) -> str:
    """What the server's model says."""
    return request["messages"][-1]["content"][::-1]


def completion(text: str, finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    """A chat completion; ``more`` goes to its only choice."""
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason, **more}]}


class FakeServer:
    """What arrived, and how to reply to it.

    Attributes:
        reply: Request -> status, headers, body (a string, or anything for JSON).
        requests: Bodies in the order of their arrival.
        authorization: Their headers of that name.
        most: Most requests that were under way at a time.
    """

    def __init__(self, url: str, lock: threading.Lock) -> None:
        self.url, self.lock = url, lock
        self.reply: Callable[[dict[str, Any]], Reply] = lambda request: (200, {}, completion(backwards(request)))
        self.requests: list[dict[str, Any]] = []
        self.authorization: list[str | None] = []
        self.most = self.now = 0

    @property
    def asked(self) -> list[str]:
        """The last message of every request."""
        return [request["messages"][-1]["content"] for request in self.requests]


class _Handler(Handler):
    def do_POST(self) -> None:  # noqa: N802
        fake: FakeServer = self.server.fake  # type: ignore[attr-defined]
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with fake.lock:
            fake.requests.append(request)
            fake.authorization.append(self.headers["authorization"])
            fake.now += 1
            fake.most = max(fake.most, fake.now)
        status, headers, body = (
            fake.reply(request) if self.path == "/v1/chat/completions" else (404, {}, "no such path")
        )
        with fake.lock:
            fake.now -= 1
        self.reply(status, headers, (body if isinstance(body, str) else json.dumps(body)).encode())


class _Server(Server):
    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A running server."""
    server = _Server(_Handler)
    fake = server.fake = FakeServer(f"{server.url}/v1", server.lock)  # type: ignore[attr-defined]
    with server.running():
        yield fake
