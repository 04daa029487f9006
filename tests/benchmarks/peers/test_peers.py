"""Engines beside each other: each in a process of its own, asked in turn, stopped in between."""

import sys

import pytest

from benchmarks.peers.run import SCRIPTS, Engine, Place, measure

FAKE = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from loop import serve

def load(model, mode):
    print("what engines say goes to the log")
    if mode == "broken":
        raise RuntimeError("no model here: " + model)
    step = 1 if mode == "plain" else 2
    return lambda prompts, new: [[prompt[0] + (i * step if i > 2 else i) for i in range(new)] for prompt in prompts]

serve(load)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    engines = []

    def starting(name, mode):
        place = Place(sys.executable, str(tmp_path / "fake.py"), "some/model")
        engines.append(Engine(name, mode, place, tmp_path / f"{name}.log"))
        return engines[-1]

    yield starting
    for engine in engines:
        engine.close()


def test_every_engine_completes_the_same_prompts(start, tmp_path):
    rows = measure([start("one", "plain"), start("two", "other")], [[10], [20], [30]], batch=2, new=5, rounds=2)
    assert [(row["engine"], row["mode"], row["tokens"], len(row["rounds"])) for row in rows] == [
        ("one", "plain", 15, 2), ("two", "other", 15, 2),
    ]  # fmt: skip
    assert [row["common"] for row in rows] == [5, 3], "tokens that begin as the first engine's"
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "goes to the log" in (tmp_path / "one.log").read_text()


def test_an_engine_that_does_not_start_says_why(start):
    with pytest.raises(RuntimeError, match=r"engine three \(broken\) ended(.|\n)*no model here: some/model"):
        start("three", "broken")
