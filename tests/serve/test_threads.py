"""Work for other threads that may take too long."""

import asyncio
import threading

import pytest

from medusa.serve.threads import Threads


def test_what_takes_too_long_keeps_its_place_until_it_ends():
    ended = threading.Event()

    async def all_of_it():
        threads = Threads(1)
        assert await threads.run(lambda: 5, 10) == 5
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0, 10)
        for work in (ended.wait, lambda: 5):  # the second one finds no place
            with pytest.raises(TimeoutError):
                await threads.run(work, 0.1)
        ended.set()
        assert await threads.run(lambda: 6, 10) == 6

    asyncio.run(all_of_it())
