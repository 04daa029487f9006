"""HTTP servers in a thread, for clients that talk to a service."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Handler(BaseHTTPRequestHandler):
    """Answers over connections that stay open, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits 40 ms for the acknowledgement of its headers

    def asked(self) -> dict[str, Any]:
        """The request's JSON."""
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send an answer; one to HEAD goes without its body."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """On a port of this machine; 0 = a free one.

    Attributes:
        requests: Those that were counted, in the order of their arrival.
        most: Most of them that were under way at a time.
    """

    daemon_threads = True

    def __init__(self, handler: type[Handler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.most = self._now = 0

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the tests."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def counted(self, request: dict[str, Any]) -> Iterator[None]:
        """A request is under way."""
        with self.lock:
            self.requests.append(request)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            yield
        finally:
            with self.lock:
                self._now -= 1

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Serve in a thread."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()
