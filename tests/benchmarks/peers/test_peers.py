"""Engines beside each other: each in a process of its own, asked in turn, stopped in between."""

import signal
import sys

import pytest

from medusa.benchmarks.peers.engine import SCRIPTS, Engine, Place, engines, places

FAKE = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from loop import serve

def load(model, mode, room, heads=None):
    print("what engines say goes to the log", heads)
    if mode == "broken":
        raise RuntimeError("no model here: " + model)
    if mode == "dying":
        return lambda prompts, new, eos: sys.exit("out of memory")
    return lambda prompts, new, eos: [[prompt[0] + i for i in range(new)] + eos for prompt in prompts]

serve(load, "pytest")
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    engines = []

    def starting(name, mode, heads=None):
        place = Place(sys.executable, str(tmp_path / "fake.py"), "some/model")
        engines.append(Engine(name, mode, place, tmp_path / f"{name}.log", 99, heads))
        return engines[-1]

    yield starting
    for engine in engines:
        engine.process.close()


def test_an_engine_completes_prompts_that_share_a_batch(start, tmp_path):
    engine = start("one", "plain", tmp_path / "heads")
    assert engine.complete([[10], [20]], 3, [2]) == [[10, 11, 12, 2], [20, 21, 22, 2]]
    assert engine.version == pytest.__version__
    assert f"goes to the log {tmp_path / 'heads'}" in (tmp_path / "one.log").read_text()


def test_a_base_without_copies_is_one_message(tmp_path):
    with pytest.raises(ValueError, match=r"have no copies of llama-1b; make them: benchmarks/peers/setup\.sh"):
        places(tmp_path, "llama-1b")


def test_an_engine_that_does_not_start_says_why(start):
    with pytest.raises(RuntimeError, match=r"engine three \(broken\) ended(.|\n)*no model here: some/model"):
        start("three", "broken")


def test_an_engine_that_ends_while_it_works_says_why(start):
    engine = start("four", "dying")
    for _ in range(2):  # while it answers, and when it has ended before it is asked
        with pytest.raises(RuntimeError, match=r"engine four \(dying\) ended(.|\n)*out of memory"):
            engine.complete([[1]], 2, [])


def test_engines_that_are_missing_are_left_out_and_ended_with_the_block(tmp_path, monkeypatch, caplog):
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "models" / "llama-1b").mkdir(parents=True)
    for engine, model in (("llamacpp", "model.gguf"), ("vllm", "checkpoint")):
        (tmp_path / engine / "bin").mkdir(parents=True)
        (tmp_path / engine / "bin" / "python").symlink_to(sys.executable)
        if engine == "vllm":
            (tmp_path / "models" / "llama-1b" / model).touch()
    monkeypatch.setattr("medusa.benchmarks.peers.engine.SCRIPTS", tmp_path)
    (tmp_path / "vllm_.py").symlink_to(tmp_path / "fake.py")
    handler = signal.getsignal(signal.SIGTERM)
    with engines(tmp_path, "llama-1b", 99, {}) as found:
        assert [(engine.name, engine.mode) for engine in found] == [("vllm", "plain"), ("vllm", "prompt-lookup")]
        assert found[0].complete([[3]], 2, []) == [[3, 4]]
        assert signal.getsignal(signal.SIGTERM) is not handler
    with engines(tmp_path, "llama-1b", 99, {"medusa": tmp_path / "own"}) as found:
        assert [engine.mode for engine in found] == ["plain", "prompt-lookup", "medusa"]
        assert f"goes to the log {tmp_path / 'own'}" in (tmp_path / "vllm-medusa.log").read_text()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert all(not engine.process.runs for engine in found)
    assert "engine openvino is left out" in caplog.text
    assert "engine llamacpp is left out" in caplog.text
