"""An OpenAI-compatible server in a thread: answers every conversation with its last message, backwards."""

import json
from collections.abc import Callable
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


class FakeServer(Server):
    """What arrived, and how to reply to it.

    Attributes:
        reply: Request -> status, headers, body (a string, or anything for JSON).
        authorization: Headers of that name.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.reply: Callable[[dict[str, Any]], Reply] = lambda request: (200, {}, completion(backwards(request)))
        self.authorization: list[str | None] = []

    @property
    def url(self) -> str:
        """Its address up to /v1."""
        return f"{super().url}/v1"

    @property
    def asked(self) -> list[str]:
        """The last message of every request."""
        return [request["messages"][-1]["content"] for request in self.requests]


class _Handler(Handler):
    server: FakeServer

    def do_POST(self) -> None:  # noqa: N802
        request = self.asked()
        self.server.authorization.append(self.headers["authorization"])
        with self.server.counted(request):
            known = self.path == "/v1/chat/completions"
            status, headers, body = self.server.reply(request) if known else (404, {}, "no such path")
        self.reply(status, headers, (body if isinstance(body, str) else json.dumps(body)).encode())
