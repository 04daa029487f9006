"""Start and end of a server: its address, the message that it is ready, and a shutdown that informs clients."""

import asyncio
import logging
import math
import os
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

logger = logging.getLogger(__name__)

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than in the pools of clients and proxies, which would else use one
that is being closed."""
GRACE = 5
"""Seconds after the drain in which clients may still read the ends of their streams."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address; connections are refused until a server listens.

    Args:
        host: A name or an IP address.
        port: 0 = any free port.

    Raises:
        OSError: The address is in use, or not of this machine.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"address ({host}:{port}) cannot be used: {reason}; choose --host and --port") from error
    return taken


def url(listening: socket.socket) -> str:
    """Its URL for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # all interfaces
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Uvicorn with a message when it is ready, and a shutdown that lets the engine end running requests first.

    Args:
        app: The result of ``create_app``.
        listening: The bound socket.
        drain: Seconds for which running requests may continue at shutdown.
    """

    def __init__(self, app: FastAPI, listening: socket.socket, drain: float) -> None:
        patience = math.ceil(drain) + GRACE
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_keep_alive=KEEP_ALIVE)
        config.timeout_graceful_shutdown = patience
        super().__init__(config)
        self._app, self._listening, self._drain = app, listening, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup([self._listening])
        place = url(self._listening)
        logger.info("ready at %s (web page; API at %s/v1, described at %s/docs)", place, place, place)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down: running requests get time, then streams get an error, and then connections are closed."""
        logger.info("shutting down; running requests have %g s, a second Ctrl-C ends them at once", self._drain)
        stopping = asyncio.create_task(self._app.state.stop())
        await super().shutdown([self._listening])
        if self.force_exit:
            stopping.cancel()
        logger.info("ended")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; a second Ctrl-C exits at once, without tracebacks of open connections."""
        if self.should_exit and sig == signal.SIGINT:
            try:
                logger.info("ended at once")
            finally:  # the message fails where the signal interrupts the writing of another one
                os._exit(128 + sig)
        super().handle_exit(sig, frame)
