"""Work for other threads that may take too long."""

import asyncio
import os
import threading

import pytest

from medusa.serve.threads import PRIORITY, Threads


def test_what_takes_too_long_keeps_its_place_until_it_ends():
    ended = threading.Event()

    async def all_of_it():
        threads = Threads(1)
        assert await threads.run(lambda: 5, 10) == 5
        priority = await threads.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), 10)
        assert priority == PRIORITY > os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), "of its thread alone"
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0, 10)
        for work in (ended.wait, lambda: 5):  # the second one finds no place
            with pytest.raises(TimeoutError):
                await threads.run(work, 0.1)
        ended.set()
        assert await threads.run(lambda: 6, 10) == 6

    asyncio.run(all_of_it())
