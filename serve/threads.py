"""Work for other threads, which may take too long and cannot be stopped then."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
PAUSE = 0.01
"""Seconds between two looks for a free place."""
PRIORITY = 10
"""Theirs in Linux, where 0 is the usual one: a tenth of the time of a thread that has it."""


def promise(function: Callable[[], Result]) -> tuple["Future[Result]", Callable[[], None]]:
    """The future result of a function, and what another thread calls to compute it; that cannot be cancelled."""
    found = Future[Result]()
    found.set_running_or_notify_cancel()

    def compute() -> None:
        try:
            found.set_result(function())
        except Exception as error:  # noqa: BLE001, whoever waits gets it
            found.set_exception(error)

    return found, compute


class Threads:
    """Runs functions in daemon threads, which keep neither other work nor the end of the process waiting.

    They yield to all other threads of the process, where cores are few.

    Args:
        most: Functions that run at a time, also those that nobody waits for any more.
    """

    def __init__(self, most: int) -> None:
        self._places = threading.BoundedSemaphore(most)

    async def run(self, function: Callable[[], Result], seconds: float) -> Result:
        """Run a function, and return its result.

        Raises:
            TimeoutError: It did not end, or not begin, in this time. It goes on, and keeps its place.
        """
        async with asyncio.timeout(seconds):
            while not self._places.acquire(blocking=False):
                await asyncio.sleep(PAUSE)
            found, compute = promise(function)
            threading.Thread(target=self._run, args=(compute,), daemon=True).start()
            return await asyncio.wrap_future(found)

    def _run(self, compute: Callable[[], None]) -> None:
        if sys.platform == "linux":  # where each thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)
        try:
            compute()
        finally:
            self._places.release()
