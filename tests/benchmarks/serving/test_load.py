"""The closed loop: how many ask at a time, what is counted, when it ends."""

import asyncio
import re
import time

import pytest

from medusa.benchmarks.serving import load
from medusa.benchmarks.serving.client import Answer, Asking, Client
from medusa.benchmarks.serving.figures import summarize
from medusa.benchmarks.serving.load import run_level
from tests.benchmarks.serving.streaming_server import StreamingServer, events


@pytest.fixture
def server():
    with StreamingServer().running() as running:
        running.pause = 0.002
        yield running


def level(server, clients, **end):
    async def run():
        async with Client(Asking(f"{server.url}/v1", "counting", continuous_usage=True)) as client:
            return await run_level(client.ask, [f"prompt {number}" for number in range(50)], clients, 8, **end)

    return asyncio.run(run())


@pytest.mark.parametrize("clients", [1, 4])
def test_so_many_clients_ask_until_enough_is_complete(server, clients):
    done = level(server, clients, requests=12)
    assert server.most == clients
    whole = [answer for answer in done.answers if answer.ended >= done.opened]
    assert 12 <= len(whole) < 12 + clients, "what runs at the end is completed"
    figures = summarize(done)
    assert figures["requests"] == pytest.approx(12, abs=1)
    assert figures["tokens"] == pytest.approx(12 * 8, abs=8 * clients)
    assert figures["tokens_per_request"] == 8
    assert (figures["errors"], figures["tokens_from"], figures["inter_token_of"]) == (0, "usage", "token")


def test_first_answers_are_cut_at_different_lengths(server):
    level(server, 4, requests=4)
    assert sorted(request["max_tokens"] for request in server.requests[:4]) == [2, 4, 6, 8]
    # Two clients may be ready at the same time.
    assert {request["messages"][0]["content"] for request in server.requests[4:6]} == {"prompt 4", "prompt 5"}


def test_the_window_is_as_long_as_asked_for(server):
    done = level(server, 2, seconds=0.3)
    # No narrow limit above: a busy machine can hold the loop up for half a second.
    assert 0.29 < done.closed - done.opened < 5
    figures = summarize(done)
    sent = sum(answer.count for answer in done.answers)
    assert 0 < figures["tokens"] < sent, "the warm-up and the end do not count"


def test_errors_are_counted_and_the_rest_goes_on(server, monkeypatch):
    monkeypatch.setattr(load, "PAUSE", 0.01)
    seen = []

    def reply(request):
        seen.append(1)
        return (503, "busy") if len(seen) % 3 == 0 else events(request)

    server.reply = reply
    figures = summarize(level(server, 2, requests=8))
    assert figures["errors"] == len(seen) // 3 > 0
    assert figures["error_messages"] == {"status 503: busy": figures["errors"]}
    assert figures["requests"] >= 8
    assert figures["tokens_per_request"] == 8


def test_a_server_that_fails_always_is_no_figure(server):
    server.reply = lambda _: (404, "no such model")
    with pytest.raises(ExceptionGroup) as caught:
        level(server, 3, seconds=5)
    # Its three clients ask at the same time, so others may have failed too when the third failure is seen.
    told = r"failed all of the first [3-9] requests, the last with: status 404: no such model"
    assert re.search(told, str(caught.value.exceptions[0]))


def test_a_server_that_is_gone_ends_the_level(monkeypatch):
    monkeypatch.setattr(load, "PAUSE", 0.001)
    asked = []

    async def ask(prompt, tokens):
        now, error = time.monotonic(), "connection refused" if len(asked) >= 4 else None
        asked.append(prompt)
        return Answer(now, [now], tokens=1, ended=now, error=error)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run_level(ask, ["x"], 2, 1, requests=50))
    assert "failed 20 requests in a row, the last with: connection refused" in str(caught.value.exceptions[0])


def test_the_window_opens_when_every_client_has_had_an_answer():
    whole = []  # answers of full length; the first one is the second client's first

    async def ask(prompt, tokens):
        now, slow = time.monotonic(), tokens == 8 and not whole
        whole.extend([1] * (tokens == 8))
        await asyncio.sleep(0.1 if slow else 0.001)
        return Answer(now, [now], tokens=1, ended=time.monotonic())

    began = time.monotonic()
    level = asyncio.run(run_level(ask, ["x"], 2, 8, requests=1))
    assert level.opened - began > 0.05


def test_a_level_needs_an_end(server):
    with pytest.raises(ValueError, match="level has no end"):
        level(server, 1)


def test_clients_wait_after_a_failure(monkeypatch):
    monkeypatch.setattr(load, "PAUSE", 0.05)
    count = 0

    async def ask(prompt, tokens):
        nonlocal count
        count += 1
        now = time.monotonic()
        return Answer(now, [now], tokens=1, ended=now, error="broken" if count > 1 else None)

    asyncio.run(run_level(ask, ["x"], 1, 1, seconds=0.2))
    assert count <= 6
