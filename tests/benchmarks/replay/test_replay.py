"""Traces survive the disk, and are forced through steps token for token."""

import pytest
import torch

from benchmarks.replay.replay import ForcedRule, measure_replay, schedule
from benchmarks.replay.trace import SMOLLM2_TRACE, Trace, emitted_per_step, load_trace, record, save_trace
from benchmarks.step.shapes import random_heads
from medusa.acceptance import greedy


def test_replay_emits_exactly_what_the_trace_says(rig):
    emitted_SB = torch.tensor([[1, 5, 2], [4, 1, 1], [3, 3, 5], [1, 2, 1]])
    results = rig.run(rig.drafter(32), ForcedRule(greedy, emitted_SB), steps=4)
    assert [[len(tokens) for tokens in result] for result in results] == emitted_SB.tolist()


def test_replay_takes_drafted_tokens_and_the_bases_own_after_them(rig):
    drafter = rig.drafter(32)
    (result,) = rig.run(drafter, ForcedRule(greedy, torch.tensor([[3, 1, 4]])))
    draft = rig.draft(32)
    logits_BNV = rig.verify(draft)
    for row, tokens in enumerate(result):
        node = 0
        for token in tokens[:-1]:
            below = (draft.parents[row] == node) & (draft.tokens[row] == token) & (draft.depths[row] > 0)
            assert below.any()
            node = int(below.int().argmax())
        assert tokens[-1] == int(logits_BNV[row, node].argmax())


def test_a_trace_deeper_than_the_tree_is_clamped(rig):
    (result,) = rig.run(rig.drafter(2), ForcedRule(greedy, torch.tensor([[9, 1, 2]])))
    assert [len(tokens) for tokens in result] == [2, 1, 2]


def test_replay_reads_the_whole_trace_evenly():
    trace = Trace((1, 1, 1, 5), {})
    assert schedule(trace, steps=4, batch=3).sum() == 3 * 8
    assert schedule(trace, steps=2, batch=2).tolist() == [[1, 1], [1, 5]]


def test_tokens_of_a_step_end_with_the_bases_own():
    assert emitted_per_step([False, True, True, False, False, True]) == [1, 3, 1]
    assert emitted_per_step([True, True]) == []


def test_a_recorded_trace_survives_the_disk(model, tmp_path):
    prompts = [[5, 6, 7], [9, 8]]
    trace = record(model, prompts, max_new_tokens=20, nodes=6, drafter="heads")
    outputs = [model.generate(prompt, max_new_tokens=20, nodes=6, drafter="heads") for prompt in prompts]
    emitted = [emitted_per_step(output.drafted) for output in outputs]
    assert list(trace.emitted) == emitted[0] + emitted[1]
    assert all(output.steps - len(steps) in (0, 1) for output, steps in zip(outputs, emitted, strict=True))
    save_trace(trace, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == trace


def test_the_shipped_trace_can_be_replayed():
    trace = load_trace(SMOLLM2_TRACE)
    assert len(trace.emitted) > 100
    assert 1 < trace.tokens_per_step < 6
    assert (trace.provenance["drafter"], trace.nodes) == ("heads", 8)


def test_other_engines_are_timed_in_turn_with_ours(tiny):
    asked = []

    def theirs():
        asked.append(1)
        return 2.0  # seconds per token

    heads = random_heads(tiny, "recurrent", 4)
    row = measure_replay(tiny, heads, Trace((1, 3), {}), 8, 1, 20, 4, 3, 0, others={"other 1.0": theirs})
    (other,) = row["others"]
    assert len(asked) >= 3
    assert (other["engine"], other["tokens_per_s"]) == ("other 1.0", 0.5)
    assert other["plain_over"] == pytest.approx(2 * row["plain_tokens_per_s"], rel=0.5)
    assert other["replay_over"] == pytest.approx(2 * row["replay_tokens_per_s"], rel=0.5)


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"format": "medusa-trace"}', '{"format": "medusa-trace", "emitted": [0]}']
)
def test_damaged_traces_are_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="record it again"):
        load_trace(tmp_path / "x.json")
