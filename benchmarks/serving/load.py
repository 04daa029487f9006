"""A closed loop of clients: each asks the next prompt as soon as its answer is complete.

The first answer of each client is the warm-up, and cut at a different length each, so that clients do not march in
step. The window opens when all of these are complete. What happens in it counts: tokens that arrive, first tokens,
gaps that end, answers that end. When it closes nothing new is asked; what runs is completed, so that its tokens are
known and the server is idle afterwards.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from medusa.benchmarks.serving.client import Answer

PAUSE = 1.0
"""Seconds that a client waits after a failure, so that a server which refuses is not flooded."""

Ask = Callable[[str, int], Awaitable[Answer]]
"""Prompt and most tokens -> answer."""


@dataclass
class Level:
    """What so many clients have seen."""

    clients: int
    answers: list[Answer] = field(default_factory=list)
    """All of them, those of the warm-up and of the end too."""
    opened: float = float("inf")
    closed: float = float("inf")


async def run_level(
    ask: Ask,
    prompts: Sequence[str],
    clients: int,
    max_tokens: int,
    seconds: float | None = None,
    requests: int | None = None,
) -> Level:
    """Load a server with so many clients.

    Args:
        ask: Asks it.
        prompts: Asked in turn, from the beginning again after the last one.
        clients: Requests that are under way at a time.
        max_tokens: Length of answers.
        seconds: The window closes after so long; None = only after ``requests``.
        requests: The window closes after so many complete answers; None = only after ``seconds``.

    Raises:
        RuntimeError: Not one of the first answers was complete.
    """
    if seconds is None and requests is None:
        raise ValueError("level has no end; give seconds, requests or both")
    level, texts = Level(clients), itertools.cycle(prompts)
    opened, full = asyncio.Event(), asyncio.Event()

    async def once(tokens: int) -> Answer:
        answer = await ask(next(texts), tokens)
        level.answers.append(answer)
        return answer

    async def client(number: int) -> None:
        await once(max(1, max_tokens * (number + 1) // clients))
        if len(level.answers) >= clients and not opened.is_set():
            _check(level)
            opened.set()
        while not full.is_set():
            answer = await once(max_tokens)
            if answer.error:
                await asyncio.sleep(PAUSE)
            elif requests is not None and _complete(level) >= requests:
                full.set()

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        await opened.wait()
        level.opened = time.monotonic()
        try:
            await asyncio.wait_for(full.wait(), seconds)
        except TimeoutError:
            full.set()
        level.closed = time.monotonic()
    return level


def _complete(level: Level) -> int:
    return sum(answer.error is None and answer.ended >= level.opened for answer in level.answers)


def _check(level: Level) -> None:
    """The first answers: where all have failed, the server or the request is wrong, and no figure is."""
    errors = [answer.error for answer in level.answers if answer.error]
    if len(errors) == len(level.answers):
        raise RuntimeError(
            f"server failed all of the first {len(errors)} requests, the last with: {errors[-1]}; look at its log"
        )
