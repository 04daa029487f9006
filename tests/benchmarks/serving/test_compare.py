"""Servers as processes: loaded in turn, the others stopped; and the command line."""

import json
import sys
import time
from pathlib import Path

import pytest

from medusa.benchmarks.serving import __main__ as command
from medusa.benchmarks.serving import servers
from medusa.benchmarks.serving.compare import Plan, compare, medians
from medusa.benchmarks.serving.servers import NAMES, Place, Server, places
from tests.benchmarks.serving.streaming_server import StreamingServer

HERE = Path(__file__).with_name("streaming_server.py")
ENVIRONMENT = {"PYTHONPATH": str(HERE.parents[3])}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(servers, "WAKE_SECONDS", 0.05)


def place(*words):
    return Place([sys.executable, str(HERE), "{port}", *words], "counting", True, ENVIRONMENT)


def becomes(server, states):
    """Whether the process is in one of these states soon: a signal takes a moment."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if Path(f"/proc/{server.process._process.pid}/stat").read_text().rpartition(")")[2].split()[0] in states:
            return True
        time.sleep(0.01)
    return False


def test_servers_are_loaded_in_turn(tmp_path):
    plan = Plan([f"prompt {number}" for number in range(20)], [1, 3], 4, None, 6, rounds=2)
    contestants = {"one": place(), "other": place()._replace(more={"speculation": {}})}
    rows = compare(contestants, plan, tmp_path)
    order = [(row["round"], row["clients"], row["server"]) for row in rows]
    assert order == [(turn, clients, name) for turn in (0, 1) for clients in (1, 3) for name in contestants]
    assert all(row["requests"] >= 5 and not row["errors"] for row in rows)
    shown = medians(rows)
    assert [(row["server"], row["clients"]) for row in shown] == [
        (name, clients) for clients in (1, 3) for name in contestants
    ]
    speeds = [row["tokens_per_second"] for row in rows if (row["server"], row["clients"]) == ("one", 1)]
    assert shown[0]["tokens_per_second"] == sum(speeds) / 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux tells states of processes")
def test_a_server_that_is_not_asked_is_stopped(tmp_path):
    server = Server("a", place(), tmp_path / "a.log")
    try:
        assert becomes(server, "T")
        with server.awake(0.0):
            assert becomes(server, "SR")
    finally:
        server.process.close()
    assert not Path(f"/proc/{server.process._process.pid}").exists()


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"server a ended; .*a.log says:\nno model here"):
        Server("a", place("broken"), tmp_path / "a.log")


def test_every_contestant_has_a_place():
    known = places(Path("/peers"), "/models/smollm2", "runs/heads")
    assert set(NAMES) == set(known)
    assert all("{port}" in place.command for place in known.values())
    assert "runs/heads" in known["ours"].command


def test_the_command_writes_figures_and_a_picture(tmp_path, capsys):
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    with StreamingServer().running() as server:
        words = ["load", f"{server.url}/v1", "--levels", "1", "2", "--requests", "4", "--max-tokens", "4"]
        assert command.main([*words, "--json", str(figures), "--picture", str(picture)]) == 0
        server.reply = lambda _: (500, "broken")
        assert command.main(words) == 1
    told = capsys.readouterr()
    assert "counting" in told.out
    assert "times are between chunks" in told.out
    assert "failed all of the first 1 requests, the last with: status 500: broken" in told.err
    written = json.loads(figures.read_text())
    assert [row["clients"] for row in written["figures"]] == [1, 2]
    assert written["command"].startswith("python -m medusa.benchmarks.serving load http://127.0.0.1")
    assert picture.stat().st_size > 1000


def test_a_body_is_an_object(capsys):
    with pytest.raises(SystemExit):
        command.main(["load", "http://localhost/v1", "--body", "[1]"])
    assert "value ([1]) must be a JSON object" in capsys.readouterr().err


def test_the_command_compares(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("medusa.base.smollm2.locate", lambda name: f"/models/{name}")
    monkeypatch.setattr(command, "places", lambda *_: {"ours-plain": place(), "vllm": place()})
    words = [str(tmp_path), "--servers", "ours-plain", "vllm", "--levels", "2", "--requests", "4", "--max-tokens", "3"]
    assert command.main(["compare", *words]) == 0
    out = capsys.readouterr().out
    assert "ours-plain" in out
    assert "vllm" in out
    assert (tmp_path / "serving-ours-plain.log").exists()
