"""The common service of the endpoints: submits requests and merges their results."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request as HttpRequest

from medusa.serve.api.errors import ApiError
from medusa.serve.api.texts import Texts
from medusa.serve.engine import Engine
from medusa.serve.models import Models
from medusa.serve.request import Asked, Delta, Ticket
from medusa.serve.settings import ApiSettings

if TYPE_CHECKING:
    from medusa.serve.grammar import Grammars

Result = TypeVar("Result")
DISCONNECTED = 0.2
"""Seconds between two checks whether a client is still connected."""
CLIENT_GONE = 499
"""Nginx's status for a client that has disconnected; it is only logged."""


@dataclass
class Service:
    """The engine behind the API.

    Attributes:
        texts: Computations on texts and tokens; long ones run in ``aside``.
    """

    engine: Engine
    models: Models
    grammars: "Grammars"
    settings: ApiSettings
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = Texts(self.engine.model.base, self.models.name, self.grammars)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="texts")

    async def aside(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a computation on texts without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, function, *arguments)

    async def start(self, requests: Sequence[Asked]) -> list[Ticket]:
        """Submit requests; either all are accepted, or none.

        Raises:
            BusyError, LateError, StoppingError, EngineError, ValueError: A request is refused, see ``handle_errors``.
        """
        tickets = [self.engine.submit(request) for request in requests]
        try:
            for ticket in tickets:
                await ticket.taken()
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets


async def merged(tickets: Sequence[Ticket]) -> AsyncGenerator[tuple[int, Delta]]:
    """New parts of the completions with their numbers, in the order of arrival."""
    if len(tickets) == 1:
        async with aclosing(tickets[0].deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def pump(number: int, ticket: Ticket) -> None:
        try:
            async with aclosing(ticket.deltas()) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((number, delta))
        except Exception as error:  # noqa: BLE001 - it is raised where deltas are read
            arrived.put_nowait((number, error))
        arrived.put_nowait((number, None))

    pumps = [asyncio.create_task(pump(number, ticket)) for number, ticket in enumerate(tickets)]
    try:
        left = len(pumps)
        while left:
            number, event = await arrived.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield number, event
    finally:
        for task in pumps:
            task.cancel()
        for ticket in tickets:
            ticket.cancel()


async def while_connected(request: HttpRequest, work: Awaitable[Result]) -> Result:
    """The result of the work, which is cancelled if the client disconnects.

    Raises:
        ApiError: The client has disconnected.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=DISCONNECTED))[0]:
            if await request.is_disconnected():
                raise ApiError(CLIENT_GONE, "the client has disconnected")
        return task.result()
    finally:
        task.cancel()
