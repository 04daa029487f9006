"""A closed loop of clients: each sends the next prompt as soon as its answer is complete.

The first answer of each client is the warm-up, with a different length for each client, so that clients are not
synchronous. The window opens when all first answers are complete. Events in it count: tokens that arrive, first tokens,
gaps that end, answers that end. After it closes no new request is sent; running requests are completed, so that their
tokens are known and the server is idle afterwards.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from medusa.benchmarks.serving.client import Answer

PAUSE = 1.0
"""Seconds that a client waits after a failure, so that a refusing server is not flooded."""
GIVE_UP = 10
"""Failures in a row, for each client, after which the server counts as gone."""

Ask = Callable[[str, int], Awaitable[Answer]]
"""(prompt, most new tokens) -> answer."""


@dataclass
class Level:
    """The observations of a number of clients."""

    clients: int
    answers: list[Answer] = field(default_factory=list)
    """All answers, including those of the warm-up and after the window."""
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
    """Load a server with a number of clients.

    Args:
        ask: Sends a request.
        prompts: Prompts, used in order; after the last one the first follows.
        clients: Number of concurrent requests.
        max_tokens: Most tokens of an answer.
        seconds: Length of the window; None = only ``requests`` ends it.
        requests: Number of complete answers that ends the window; None = only ``seconds`` ends it.

    Raises:
        RuntimeError: None of the first answers was complete, or the server is gone.
    """
    if seconds is None and requests is None:
        raise ValueError("level has no end; give seconds, requests or both")
    level, texts = Level(clients), itertools.cycle(prompts)
    opened, full = asyncio.Event(), asyncio.Event()
    firsts, failed = list[Answer](), 0

    async def once(tokens: int) -> Answer:
        answer = await ask(next(texts), tokens)
        level.answers.append(answer)
        return answer

    async def client(number: int) -> None:
        nonlocal failed
        firsts.append(await once(max(1, max_tokens * (number + 1) // clients)))
        if len(firsts) == clients:
            _check(firsts, f"all of the first {clients} requests")
            opened.set()
        while not full.is_set():
            answer = await once(max_tokens)
            failed = failed + 1 if answer.error else 0
            if answer.error and failed < GIVE_UP * clients:
                await asyncio.sleep(PAUSE)
            elif answer.error:
                _check([answer], f"{failed} requests in a row")
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


def _check(answers: Sequence[Answer], which: str) -> None:
    """Raise an error if all of these answers have failed, because the server or the requests are then wrong."""
    if all(answer.error for answer in answers):
        raise RuntimeError(f"server failed {which}, the last with: {answers[-1].error}; look at its log")
