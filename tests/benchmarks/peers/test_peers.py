"""Engines beside each other: each in a process of its own, asked in turn, stopped in between."""

import sys

import pytest

from benchmarks.peers.process import SCRIPTS, Engine, Place

FAKE = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from loop import serve

def load(model, mode):
    print("what engines say goes to the log")
    if mode == "broken":
        raise RuntimeError("no model here: " + model)
    return lambda prompts, new, eos: [[prompt[0] + i for i in range(new)] + eos for prompt in prompts]

serve(load, "pytest")
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


def test_an_engine_completes_prompts_that_share_a_batch(start, tmp_path):
    engine = start("one", "plain")
    assert engine.complete([[10], [20]], 3, [2]) == [[10, 11, 12, 2], [20, 21, 22, 2]]
    assert engine.version == pytest.__version__
    assert "goes to the log" in (tmp_path / "one.log").read_text()


def test_an_engine_that_does_not_start_says_why(start):
    with pytest.raises(RuntimeError, match=r"engine three \(broken\) ended(.|\n)*no model here: some/model"):
        start("three", "broken")
