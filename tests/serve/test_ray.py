"""Replicas behind Ray Serve: their settings, requests asked for again, and a replica killed under load."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'medusa-decoding[ray]'")
psutil = pytest.importorskip("psutil", reason="psutil is not installed: it finds the replicas' processes")

from medusa.serve.ray_app import BESIDE, PROXY, TRIES, Retries, app, build, build_ray_parser, options  # noqa: E402

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def flags(*words):
    return build_ray_parser().parse_args(["--device", "cpu", *words])


def test_a_replica_takes_what_its_engine_takes_and_drains_as_long():
    told = options(flags("--max-batch", "3", "--max-waiting", "4", "--drain", "7", "--replicas", "2", "--cpus", "5"))
    assert (told["num_replicas"], told["max_ongoing_requests"]) == (2, 7 + BESIDE)
    assert told["graceful_shutdown_timeout_s"] == 7
    assert told["ray_actor_options"] == {"num_cpus": 5, "num_gpus": 0}
    assert options(flags("--processes", "3", "--cpus", "2"))["ray_actor_options"]["num_cpus"] == 6


def test_replicas_follow_the_load():
    told = options(flags("--replicas", "2", "--max-replicas", "5", "--max-batch", "8", "--gpus", "0.5"))
    assert "num_replicas" not in told
    assert told["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 8}
    assert told["ray_actor_options"]["num_gpus"] == 0.5
    asked = options(flags("--max-replicas", "5", "--target-requests", "4"))["autoscaling_config"]
    assert asked == {"min_replicas": 1, "max_replicas": 5, "target_ongoing_requests": 4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cuda:1"), r"device \(cuda:1\) cannot be chosen: Ray"),
        (("--replicas", "3", "--max-replicas", "2"), r"max-replicas \(2\) is below replicas \(3\)"),
        (("--target-requests", "3"), r"target-requests \(3\) needs a range of replicas"),
        (("--port", "0"), r"port \(0\) must be named"),
        (("--tensor-parallel",), r"tensor-parallel divides the base of a replica among its processes; give"),
    ],
)
def test_what_ray_cannot_run_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        build(flags(*words))


def test_serve_run_gives_words_and_a_yaml_file_gives_anything():
    os.environ.pop(PROXY, None)
    assert type(app({"base": "embedded", "device": "cpu", "replicas": "2", "int8": "true"})).__name__ == "Application"
    assert os.environ[PROXY] == "medusa.serve.ray_app:middleware"
    app({"device": "cpu", "replicas": 2, "int8": True, "no_graph": False, "more_heads": ["a=heads/a", "b=heads/b"]})


def asked(*attempts, body=(b"question",)):
    """What a client gets from a proxy whose attempts to answer send these messages each; and what each has heard."""
    sent, heard, left = [], [], iter(attempts)
    client = iter([{"type": "http.request", "body": part} for part in body] + [{"type": "http.disconnect"}])

    async def proxy(scope, receive, send):
        messages = next(left)
        heard.append([(await receive())["body"] for _ in body])
        if messages == "gone":
            await receive()
            return
        for message in messages:
            await send(message)

    async def receive():
        return next(client)

    async def send(message):
        sent.append(message)

    asyncio.run(Retries(proxy)({"type": "http", "headers": []}, receive, send))
    return sent, heard


def said(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


START = {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"1")]}
OPENED = said(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
CREATED = said(b'event: response.created\ndata: {"type":"response.created"}\n\n')
TEXT = said(b'data: {"choices":[{"delta":{"content":"\\"role\\":\\"assistant\\""}}]}\n\n')
END = said(b"", more=False)


@pytest.mark.parametrize("lost", [[], [START], [START, OPENED], [START, OPENED, OPENED], [START, CREATED]])
def test_what_was_not_answered_is_asked_again_with_its_whole_body(lost):
    sent, heard = asked(lost, [START, OPENED, TEXT, END], body=(b"long ", b"question"))
    assert sent == [START, OPENED, TEXT, END]
    assert heard == [[b"long ", b"question"]] * 2


@pytest.mark.parametrize("begun", [[START, OPENED, TEXT], [START, said(OPENED["body"] + TEXT["body"])], [START, END]])
def test_what_has_begun_is_never_said_twice(begun):
    sent, heard = asked(begun, [START, TEXT, END])
    assert sent == begun
    assert len(heard) == 1


def test_requests_that_kill_and_clients_that_go_are_not_asked_again():
    sent, heard = asked(*[[START]] * TRIES)
    assert (sent, len(heard)) == ([], TRIES)
    sent, heard = asked("gone")
    assert (sent, len(heard)) == ([], 1)


def test_a_header_comes_once():
    sent, _ = asked([START | {"headers": START["headers"] * 2}, END])
    assert sent == [START, END]


@pytest.fixture(scope="module")
def server(base_directory):
    """Two replicas of the small base, which decode one request at a time each."""
    with running(base_directory, "--replicas", "2", "--max-batch", "1", count=2) as found:
        yield found


@contextmanager
def running(base, *words, count=1):
    """A server of so many replicas, until they are ready and to their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--base", base, "--name", "small", "--device", "cpu", *words, "--port", port]
    command = [sys.executable, "-m", "medusa.serve.ray_app", "--drain", "20", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name not in (PROXY, "RAY_ADDRESS")}
    environment |= {"MEDUSA_ADMIN_KEY": "root", "XDG_CACHE_HOME": str(ROOT / ".cache")}  # with compiled kernels
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 120
        while not ready(process, url, count):
            assert process.poll() is None
            assert time.monotonic() < until, "it starts"
            time.sleep(0.5)
        try:
            yield process, url
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def replicas(process, name="ServeReplica"):
    """Processes of this server's replicas; other servers may run beside it."""
    return [child for child in psutil.Process(process.pid).children(recursive=True) if name in named(child)]


def named(child):
    try:
        return " ".join(child.cmdline())
    except psutil.Error:
        return ""


def ready(process, url, count):
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200 and len(replicas(process)) == count
    except httpx.HTTPError:
        return False


async def ask(client, number, tokens=60):
    """A chat as a stream, or whole: the text that came, and whether it came to its end."""
    messages = [{"role": "user", "content": f"say {number}"}]
    body = {"model": "small", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": number % 3 != 0}
    text, ended = "", False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if not body["stream"]:
                answer = json.loads(await response.aread())
                return answer["choices"][0]["message"]["content"], response.status_code == 200
            async for line in response.aiter_lines():
                ended |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    except httpx.RemoteProtocolError:  # how a stream breaks off
        pass
    return text, ended


def test_what_had_not_begun_outlives_its_replica(server):
    process, url = server

    async def load():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            requests = [asyncio.create_task(ask(client, number)) for number in range(30)]
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            replicas(process)[0].kill()
            waited = sum(not request.done() for request in requests)
            return waited, await asyncio.gather(*requests)

    waited, answers = asyncio.run(load())
    assert waited > 10, "it was killed under load"
    assert not [number for number, (text, ended) in enumerate(answers) if not ended and not text]
    assert sum(not ended for _, ended in answers) <= 1, "of a batch of one"


def test_a_client_that_goes_takes_its_request_back(server):
    _, url = server
    until = time.monotonic() + 30
    while 'finished_reason="abort"' not in httpx.get(f"{url}/metrics", timeout=60).text:  # of one replica or the other
        assert time.monotonic() < until
        body = {"model": "small", "prompt": "say", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())


def test_heads_stay_as_they_are(server):
    _, url = server
    headers = {"Authorization": "Bearer root"}
    for method, path in (("POST", "/v1/heads"), ("DELETE", "/v1/heads/some")):
        response = httpx.request(method, url + path, headers=headers, json={"name": "a", "path": "b"}, timeout=60)
        assert response.status_code == 403
        assert "heads cannot be changed at run time" in response.json()["error"]["message"]


def test_streams_that_run_may_end_before_the_server_does(server):
    process, url = server

    async def last():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            requests = [asyncio.create_task(ask(client, number)) for number in range(1, 12)]
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*requests)

    assert all(ended for _, ended in asyncio.run(last()))
    assert process.wait(60) == 0


def test_a_replica_of_two_processes_begins_anew_when_one_of_them_dies(base_directory):
    with running(base_directory, "--processes", "2") as (process, url):
        body = {"model": "small", "prompt": "say", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        text = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        (rank,), (replica,) = replicas(process, "medusa.serve.server"), replicas(process)
        rank.kill()
        replica.wait(30)
        until = time.monotonic() + 60
        while not ready(process, url, 1):
            assert time.monotonic() < until
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] == text
        last = replicas(process, "medusa.serve.server")
    assert not psutil.wait_procs(last, timeout=30)[1]
