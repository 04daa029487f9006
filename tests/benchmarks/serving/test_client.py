"""One request: what is counted, wherever its bytes break, and what is an error."""

import asyncio
import json
import re

import pytest

from medusa.benchmarks.serving.client import Answer, Asking, Client, first_model
from tests.benchmarks.serving.streaming_server import StreamingServer, events

REQUEST = {"messages": [], "max_tokens": 5, "stream_options": {"continuous_usage_stats": True}}


@pytest.fixture
def server():
    with StreamingServer().running() as running:
        yield running


def ask(server, prompt="count", max_tokens=5, **options):
    async def run():
        async with Client(Asking(f"{server.url}/v1", "counting", **options)) as client:
            return await client.ask(prompt, max_tokens)

    return asyncio.run(run())


def test_an_answer_tells_its_tokens(server):
    answer = ask(server)
    assert answer.error is None
    assert (answer.count, len(answer.times), answer.counted) == (5, 5, False)
    assert answer.asked <= answer.times[0] <= answer.times[-1] <= answer.ended
    assert server.requests[0] == {
        "model": "counting", "messages": [{"role": "user", "content": "count"}], "max_tokens": 5, "temperature": 0.0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "line_end"), [(1, b"\n"), (1, b"\r\n"), (11, b"\r\n"), (10_000, b"\n"), (10_000, b"\r\n")]
)
def test_pieces_of_the_body_may_break_anywhere(server, size, line_end):
    def pieces(request):
        whole = b"".join(events(request)).replace(b"\n", line_end)
        return [whole[first : first + size] for first in range(0, len(whole), size)]

    server.reply = pieces
    answer = ask(server, continuous_usage=True)
    assert (answer.error, answer.count, answer.told) == (None, 5, [1, 2, 3, 4, 5])
    assert (answer.finished, answer.shares()) == (True, [1, 1, 1, 1, 1])


def test_tokens_of_a_chunk_are_those_that_the_server_tells(server):
    server.reply = lambda request: events(request, per_chunk=3)
    told, untold = ask(server, max_tokens=7, continuous_usage=True), ask(server, max_tokens=7)
    assert (told.counted, told.shares()) == (True, [3, 3, 1])
    assert (untold.counted, untold.shares()) == (False, [7 / 3] * 3)


def test_tokens_without_text_belong_to_the_last_chunk():
    assert Answer(0.0, [1.0, 2.0], [1, 2], tokens=3).shares() == [1, 2]
    assert Answer(0.0, [1.0, 2.0]).shares() == [1, 1], "chunks stand for tokens that nobody tells"


def test_an_answer_without_text_comes_at_its_end(server):
    server.reply = lambda request: events(request | {"max_tokens": 0}, ending="stop")
    answer = ask(server)
    assert (answer.error, answer.count, answer.times) == (None, 0, [answer.ended])


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((429, "queue is full"), "status 429: queue is full"),
        ((200, "hello"), "the stream ended before the answer"),
        ([b'data: {"error": {"message": "a step has failed"}}\n\n'], "error in the stream: .*a step has failed"),
        ([b"data: {broken\n\n"], "property name"),
        ([b"data: {}\n\n"], "not a chunk of an answer: KeyError"),
        (events(REQUEST)[:3], "the stream ended before the answer"),
        ([*events(REQUEST)[:3], None], "RemoteProtocolError"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(server, reply, message):
    server.reply = lambda _: reply
    answer = ask(server)
    assert answer.error is not None
    assert re.search(message, answer.error), answer.error


def test_a_server_that_is_away_is_an_error():
    async def run():
        async with Client(Asking("http://127.0.0.1:9/v1", "m")) as client:
            return await client.ask("x", 1)

    assert "ConnectError" in str(asyncio.run(run()).error)
    with pytest.raises(RuntimeError, match=r"server \(http://127.0.0.1:9/v1\) does not name its models"):
        first_model("http://127.0.0.1:9/v1")


def test_the_first_model_is_taken(server):
    assert first_model(f"{server.url}/v1/") == "counting"
    assert json.dumps(server.requests) == "[]"
