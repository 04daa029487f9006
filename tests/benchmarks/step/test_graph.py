"""Benchmarks time what ``generate`` runs on a GPU, steps as graphs; tests/medusa/tape.py stands in for the GPU."""

import pytest
import torch

from benchmarks.decoding.tables import title
from benchmarks.replay.replay import ForcedRule, measure_replay
from benchmarks.replay.trace import Trace
from benchmarks.step import inside
from benchmarks.step.baseline import plain_sample
from benchmarks.step.rig import Rig, default_record, room_for
from benchmarks.step.shapes import random_heads
from benchmarks.step.step import measure_steps
from medusa import BaseModel
from medusa.acceptance import greedy
from medusa.heads import DraftHeads
from tests.medusa.tape import Recorder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def heads(base: BaseModel) -> DraftHeads:
    return random_heads(base, "recurrent", 4)


@pytest.fixture
def graphed(base, heads):
    """A rig that records tapes, with its recorder."""
    recorder = Recorder()
    return Rig(base, heads, batch=2, context=20, room=room_for(8, 4), record=recorder), recorder


def test_a_gpu_records_and_a_cpu_does_not(monkeypatch):
    monkeypatch.setattr("benchmarks.step.rig.cuda_recorder", lambda: "a recorder")
    assert default_record(torch.device("cuda", 0)) == "a recorder"
    assert default_record(CPU) is None


@pytest.mark.parametrize("nodes", [1, 8])
def test_recorded_steps_write_what_eager_steps_write(base, heads, graphed, nodes):
    recorded, recorder = graphed
    eager = Rig(base, heads, batch=2, context=20, room=room_for(8, 4))
    assert (recorded.graph, eager.graph) == (True, False)
    drafter = recorded.drafter(nodes)
    for _ in range(2):
        assert recorded.run(drafter, steps=4) == eager.run(eager.drafter(nodes), steps=4)
    assert recorder.recorded == 1, "what is recorded serves later runs"
    assert recorder.replays >= 2 * 4 - 1


def test_what_is_timed_is_a_replay(base, heads):
    recorder, timed = Recorder(), []

    def clock(action, device):
        before = recorder.replays
        action()
        timed.append(recorder.replays - before)
        return 4.0

    rig = Rig(base, heads, batch=2, context=20, room=room_for(8, 4), record=recorder, clock=clock)
    assert rig.step_seconds(rig.drafter(8), steps=4) == 1.0
    assert plain_sample(rig) == 4.0 / 16
    assert timed == [4, 16], "as many launches as steps"


def test_passes_are_recorded_too_and_start_where_steps_do(base, graphed):
    recorded, recorder = graphed
    draft = recorded.draft(8)
    verify = recorded.verifier(draft)
    recorded.step_seconds(recorded.drafter(8))  # moves lengths and writes rows
    keys, tree = recorded.cache.layers[1].keys, slice(20, 28)
    recorded.rewind()
    recorded.verify(draft)
    expected = keys[:, tree].clone()
    with torch.inference_mode():
        keys[:, tree] = 7.0
    replays = recorder.replays
    verify()
    assert recorder.replays == replays + 1
    torch.testing.assert_close(keys[:, tree], expected)


def test_a_pass_that_cannot_be_recorded_runs_eagerly(base, heads, caplog):
    def fail(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    failing = Rig(base, heads, batch=1, context=20, room=room_for(8, 4), record=fail)
    failing.verifier(failing.draft(8))()
    assert "operation not permitted" in caplog.text
    assert failing.step_seconds(failing.drafter(8)) > 0


def test_steps_that_go_on_and_on_stay_within_the_room(graphed):
    recorded, recorder = graphed
    step = recorded.stepper(recorded.drafter(8))
    for _ in range(100):
        step()
    assert recorder.recorded == 1
    assert recorded.cache.capacity == 20 + room_for(8, 4)


def test_a_profile_shows_replays(graphed):
    recorded, recorder = graphed
    inside.profile_steps(recorded.stepper(recorded.drafter(1)), CPU)
    assert recorder.replays >= inside.PROFILED_STEPS


def test_the_step_report_says_that_steps_are_graphs(base, heads):
    recorder = Recorder()
    report = measure_steps(base, heads, [4], [1, 2], context=16, rounds=1, record=recorder)
    assert report["graph"]
    assert recorder.recorded == 2 * 2 * 2, "a pass and a step for each batch and size"
    assert "steps as graphs" in title(
        report | {"base": "x", "weights": "random", "dtype": "float32", "threads": 1, "device_name": "a GPU"}
    )


def test_a_replay_forces_the_same_tokens_upon_graphs(base, heads):
    trace, recorder = Trace((1, 3, 9, 2, 1), {}), Recorder()
    sizes = {"nodes": 8, "batch": 2, "context": 16, "steps": 5, "rounds": 2, "seed": 0}
    eager = measure_replay(base, heads, trace, **sizes)
    recorded = measure_replay(base, heads, trace, **sizes, record=recorder)
    assert (eager["graph"], recorded["graph"]) == (False, True)
    for key in ("replay_tokens_per_step", "clamped_steps"):
        assert recorded[key] == eager[key]
    assert recorder.recorded == 2, "the trace's steps and plain ones, each once"


def test_a_forced_trace_begins_again_at_its_end(base, heads):
    plain = Rig(base, heads, batch=1, context=16, room=60)
    rule = ForcedRule(greedy, torch.tensor([[3], [1]]))
    assert [len(tokens) for (tokens,) in plain.run(plain.drafter(8), rule, steps=5)] == [3, 1, 3, 1, 3]
