"""A request on its way through the engine: what is asked for, and what comes back piece by piece.

What comes back is made on the engine's thread and read on the event loop's: nothing in it changes any more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from medusa import Output, SamplingParams, Speculation
from medusa.engine.constraint import Constraint
from medusa.engine.output import FinishReason, Piece, TokenLogprob


class BusyError(Exception):
    """The queue is full; ``retry_after`` seconds from now there may be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LateError(Exception):
    """The request was not complete in its time."""


class StoppingError(Exception):
    """The server is shutting down and takes no more requests."""


class EngineError(Exception):
    """A step has failed; the request is lost, the engine goes on."""


@dataclass(frozen=True)
class Asked:
    """What a client asks for: one completion. In the engine it becomes a ``medusa.Request``."""

    prompt: list[int]
    """Token ids."""
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    constraint: Callable[[], Constraint] | None = None
    """Makes what the completion may say; None = anything."""
    client: str = ""
    """Who asks: of those that wait, who has fewest requests running comes first."""
    priority: int = 0
    """Lower numbers come first, whoever asks."""
    timeout: float | None = None
    """Seconds that it may take with waiting; None = as long as it takes."""


class Delta(NamedTuple):
    """What a step has added to a completion."""

    pieces: tuple[Piece, ...]
    """Text that became final."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Of the tokens, where they are asked for."""
    finish_reason: FinishReason | None
    """Why it has ended; None while it grows."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Of the prompt's tokens, where they are asked for, with the first one."""


class Ticket:
    """The event loop's side of a request; iterate over it once.

    Args:
        asked: What was asked for.
        cancel: Takes the request back, from any thread.

    Attributes:
        output: The completion, complete once the last delta has come; on the engine's thread until then.
    """

    def __init__(self, asked: Asked, cancel: "Callable[[Ticket], None]") -> None:
        self.asked, self.output = asked, Output(len(asked.prompt))
        self._cancel = cancel
        self._events: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._ended = False

    def put(self, event: Delta | Exception | None) -> None:
        """Hand over what has happened, on the event loop: None first, once the request is taken."""
        self._events.put_nowait(event)

    async def taken(self) -> None:
        """Wait until the engine has checked the request and taken it.

        Raises:
            ValueError: The model cannot serve such a request.
            BusyError: The queue is full.
            StoppingError: The server is shutting down.
        """
        event = await self._events.get()
        assert event is None or isinstance(event, Exception), "the first event says whether it is taken"
        if event is not None:
            self._ended = True
            raise event

    async def deltas(self) -> AsyncGenerator[Delta]:
        """What the completion grows by, until it ends; leaving early takes the request back.

        Raises:
            LateError: Its time is over.
            EngineError: A step has failed.
        """
        try:
            while not self._ended:
                event = await self._events.get()
                if isinstance(event, Exception):
                    self._ended = True
                    raise event
                assert event is not None, "the request is taken once"
                self._ended = event.finish_reason is not None
                yield event
        finally:
            self.cancel()

    async def complete(self) -> Output:
        """The whole completion; see ``deltas``."""
        async for _ in self.deltas():
            pass
        return self.output

    def cancel(self) -> None:
        """Take the request back and free its rows; one that has ended stays as it is."""
        if not self._ended:
            self._ended = True
            self._cancel(self)
