"""``medusa serve`` from its start to its end: what it says, and how it goes."""

import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from medusa.serve.listening import Server, bind, url
from medusa.serve.server import build_app, build_parser, main
from tests.serve.live import serving

ROOT = Path(__file__).parents[2]
# A background job (of a CI, say) is started with Ctrl-C ignored, which a server in a terminal never is.
LAUNCH = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "runpy.run_module('medusa.serve.server', run_name='__main__')"
)
# Steps that take longer, so that a request of some hundred tokens is still running at a second Ctrl-C.
SLOW = (
    "import time; from medusa.engine.batch import Batch; step = Batch.step;"
    "Batch.step = lambda batch: (time.sleep(0.05), step(batch))[1];"
)
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


@contextmanager
def streaming(address, **options):
    """Lines of a completion that goes on for some time."""
    body = {"model": "small", "prompt": "hello", "max_tokens": 220, "stream": True, "ignore_eos": True} | options
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
        yield filter(None, answer.iter_lines())


def test_an_address_that_is_taken_is_one_error_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"address \(127\.0\.0\.1:{port}\) cannot be used: .* choose --host"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match=r"\(127\.0\.0\.1:70000\) cannot be used: .* 0-65535"):
        bind("127.0.0.1", 70000)


@pytest.mark.parametrize("names", [("a", "a"), ("small", "b")])
def test_names_of_heads_are_different(speaker, tmp_path, names, monkeypatch, caplog):
    monkeypatch.setattr("medusa.serve.model_options.ModelOptions.load", lambda _: speaker)
    more = [f"{name}={tmp_path}" for name in names]
    assert main(["--base", "small", "--port", "0", "--more-heads", *more]) == 1
    assert "choose" in caplog.text


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "[::1]")])
def test_addresses_are_shown_as_a_browser_takes_them(host, shown):
    with bind(host, 0) as listening:
        assert url(listening) == f"http://{shown}:{listening.getsockname()[1]}"


def test_a_drain_that_runs_out_ends_streams_with_an_error(speaker, monkeypatch):
    with serving(speaker, drain=0.1) as live:
        step = live.engine._batch.step
        monkeypatch.setattr(live.engine._batch, "step", lambda: (time.sleep(0.05), step())[1])
        with streaming(live.url) as lines:
            next(lines)
            live.server.should_exit = True
            *_, error, done = lines
    assert '"message":"the server is shutting down; ask again later"' in error
    assert '"code":"stopping"' in error
    assert done == "data: [DONE]"


def test_a_second_ctrl_c_does_not_wait_for_the_drain(speaker, monkeypatch):
    with serving(speaker, drain=60) as live:  # which fails where the server goes on for 20 s
        step = live.engine._batch.step
        monkeypatch.setattr(live.engine._batch, "step", lambda: (time.sleep(0.05), step())[1])
        with streaming(live.url, max_tokens=240) as lines:
            next(lines)
            live.server.should_exit = True
            while live.engine._ending is None:
                time.sleep(0.01)
            live.server.force_exit = True
            with suppress(httpx.HTTPError):
                assert "[DONE]" not in list(lines)[-1]


def test_a_second_ctrl_c_that_interrupts_a_message_ends_the_process_too(monkeypatch):
    def reentrant(*_):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr("medusa.serve.listening.logger.info", reentrant)
    monkeypatch.setattr("os._exit", end)
    with bind("127.0.0.1", 0) as listening:
        server = Server(FastAPI(), listening, drain=60)
        server.handle_exit(signal.SIGINT, None)
        with pytest.raises(SystemExit) as ended:
            server.handle_exit(signal.SIGINT, None)
    assert ended.value.code == 130


@pytest.mark.parametrize(("words", "remembers"), [([], True), (["--no-ngrams"], False)])
def test_completions_are_remembered_unless_the_flag_says_no(speaker, monkeypatch, words, remembers):
    model = speaker.with_heads({})
    monkeypatch.setattr("medusa.serve.model_options.ModelOptions.load", lambda _: model)
    build_app(build_parser().parse_args(words))
    assert model.drafters.remembering is remembers
    assert not speaker.drafters.remembering


@pytest.mark.slow
def test_it_says_when_and_where_it_is_ready_and_ctrl_c_ends_it_in_good_order(speaker, tmp_path):
    heads = str(speaker.save_pretrained(tmp_path / "heads"))
    command = [sys.executable, "-c", LAUNCH, "--heads", heads, "--port", "0", "--drain", "0.1", "--name", "small"]
    for ready, number in ((False, signal.SIGINT), (True, signal.SIGINT), (True, signal.SIGTERM)):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        said = [process.stderr.readline()]
        assert re.match(TIME + "loading", said[0])
        if ready:
            while "ready at" not in said[-1]:
                said.append(process.stderr.readline())
                assert said[-1], "it ends before it is ready"
            address = re.match(TIME + r"ready at (http://127\.0\.0\.1:\d+) \(web page;", said[-1])[1]
            assert any(line.startswith("heads ") for line in said)
            assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
        assert process.returncode == (0 if ready else -signal.SIGINT)
        assert "Traceback" not in rest


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_busy_process_without_a_traceback(speaker, tmp_path):
    heads = str(speaker.save_pretrained(tmp_path / "heads"))
    command = [sys.executable, "-c", SLOW + LAUNCH, "--heads", heads, "--port", "0", "--drain", "60", "--name", "small"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (found := re.search(r"ready at (http://\S+)", process.stderr.readline())):
        assert process.poll() is None, "it ends before it is ready"
    with suppress(httpx.HTTPError), streaming(found[1], speculation={"nodes": 1}) as lines:
        next(lines)  # an iterator that nobody holds would close the connection, and so end the request
        process.send_signal(signal.SIGINT)
        while "a second Ctrl-C" not in process.stderr.readline():
            assert process.poll() is None, "it ends at once"
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
