"""A request for the engine, and its results piece by piece.

Results are made on the engine's thread and read on the event loop's thread, so they are immutable.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from medusa import Output, SamplingParams, Speculation
from medusa.engine.output import FinishReason, Piece, TokenLogprob
from medusa.serve.grammar import Following


class BusyError(Exception):
    """The queue is full; there may be room after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LateError(Exception):
    """The request was not complete in its time."""


class StoppingError(Exception):
    """The server is shutting down and accepts no more requests."""


class EngineError(Exception):
    """A step has failed; the request is lost, but the engine continues."""


@dataclass(frozen=True)
class Asked:
    """A client's request for one completion. In the engine it becomes a ``medusa.Request``."""

    prompt: list[int]
    """Token ids."""
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    constraint: Callable[[], Following] | None = None
    """Makes the constraint of the completion; None = no constraint."""
    client: str = ""
    """Name of the client; among waiting requests, the client with the fewest running requests comes first."""
    priority: int = 0
    """Lower numbers come first, whatever the client."""
    timeout: float | None = None
    """Most seconds, waiting included; None = no limit."""
    text: str | None = None
    """The prompt as text, if the completion goes on from it; None = the completion is a text of its own."""
    recorded: bool = True
    """Whether it may be recorded, where a server records requests."""


class Delta(NamedTuple):
    """The part of a completion that a step has added."""

    pieces: tuple[Piece, ...]
    """New final text."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of the tokens, if requested."""
    finish_reason: FinishReason | None
    """The reason of its end; None while it grows."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Log-probabilities of the prompt's tokens, if requested; sent with the first part."""


class Ticket:
    """The event loop's side of a request; iterate over it once.

    Args:
        asked: The client's request.
        cancel: Cancels the request, from any thread.

    Attributes:
        output: The completion; it belongs to the engine's thread until the last delta has arrived.
    """

    def __init__(self, asked: Asked, cancel: "Callable[[Ticket], None]") -> None:
        self.asked, self.output = asked, Output(len(asked.prompt))
        self._cancel = cancel
        self._events: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._ended = False

    def put(self, event: Delta | Exception | None) -> None:
        """Add a result, on the event loop; the first is None when the request is accepted."""
        self._events.put_nowait(event)

    async def taken(self) -> None:
        """Wait until the engine has checked and accepted the request.

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
        """The parts of the completion, until it ends; leaving the loop early cancels the request.

        Raises:
            LateError: Its time has passed.
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

    def cancel(self) -> None:
        """Cancel the request and free its blocks; nothing happens if it has ended."""
        if not self._ended:
            self._ended = True
            self._cancel(self)
