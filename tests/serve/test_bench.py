"""medusa-bench: what it measures, on bases so small that only the logic is tested."""

import json
from functools import partial
from itertools import count

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from medusa import BaseModel
from medusa.acceptance import greedy
from medusa.attention import BACKENDS
from medusa.budget.cost import StepCosts
from medusa.clock import alternate
from medusa.drafters import HeadsDrafter, HybridDrafter, PromptLookupDrafter
from medusa.engine.step import decode_step
from medusa.heads import ARCHITECTURES
from serve.bench import arguments, attention, inside, timing
from serve.bench.__main__ import main
from serve.bench.baseline import TokenClock
from serve.bench.nodes import measure_nodes
from serve.bench.replay import ForcedRule, schedule
from serve.bench.rig import Rig, likely_tree
from serve.bench.shapes import (
    SHAPES,
    random_base,
    random_heads,
    random_model,
    shape_config,
    unpacked_copy,
    weight_bytes,
)
from serve.bench.step import Roofline
from serve.bench.timing import ratio
from serve.bench.trace import EMBEDDED_TRACE, Trace, emitted_per_step, load_trace, record, save_trace

CPU = torch.device("cpu")
TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setitem(timing.BUFFER_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(inside, "MARKS", 3)


@pytest.fixture(scope="module")
def tiny(tokenizer):
    return BaseModel(random_model(TINY, torch.float32, CPU), tokenizer, "tiny")


@pytest.fixture(scope="module")
def rig(tiny):
    return Rig(tiny, random_heads(tiny, "recurrent", 4), batch=3, context=20, room=200)


# Shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_random_weights_are_repeatable_tied_and_sane():
    first, again, other = (random_model(TINY, torch.bfloat16, CPU, seed) for seed in (0, 0, 1))
    ids = torch.arange(9)[None]
    assert torch.equal(first(ids).logits, again(ids).logits)
    assert not torch.equal(first(ids).logits, other(ids).logits)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}
    assert first.lm_head.weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.model.rotary_emb.inv_freq, LlamaForCausalLM(TINY).model.rotary_emb.inv_freq)


def test_both_sides_of_the_baseline_have_the_same_weights(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY.to_dict())
    base = random_base("tiny", torch.float32, CPU, seed=3)
    theirs = unpacked_copy(base, "tiny", seed=3)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(base.logits(base.hidden_states(ids)), theirs(ids).logits)
    assert theirs.config._attn_implementation == "sdpa"


def test_weight_bytes_leave_out_an_embedding_that_is_only_looked_up(tiny, base):
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert weight_bytes(tiny) == 4 * (2 * layer + 64 * 32 + 32)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert weight_bytes(base) == 8 * (2 * layer + base.vocab_size * 32 + 32)


def test_roofline_is_bytes_over_bandwidth(rig):
    assert Roofline(1000, 10, 100.0).seconds(batch=2, context=5) == 11.0
    assert rig.kv_bytes_per_token == 2 * 2 * (2 * 8) * 4


@pytest.mark.parametrize("nodes", [1, 2, 8, 64, 128])
def test_likely_trees_have_the_size_asked_for(nodes):
    tree = likely_tree(nodes, depth=5)
    assert tree.nodes == nodes
    assert tree.depth <= 5


def test_likely_trees_take_the_best_paths_first():
    # .5, then .25 below it, .2 beside it, .1 and .1 below these; rank 2 has .08
    assert likely_tree(6, depth=2).paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))


# Clocks


def test_rounds_begin_with_another_sample_and_the_first_does_not_count():
    calls = []
    clock = count()
    samples = {name: lambda name=name: (calls.append(name), next(clock))[1] for name in "abc"}
    times = alternate(samples, rounds=2)
    assert calls == list("cababcbca")
    assert times == {"a": [3, 8], "b": [4, 6], "c": [5, 7]}


def test_ratios_are_taken_within_rounds():
    assert ratio([2.0, 20.0, 3.0], [1.0, 10.0, 30.0]) == 2.0


def test_the_prefill_is_no_token_of_the_baseline():
    clock = TokenClock(CPU)
    clock.times = [0.0, 5.0, 6.0, 7.0]
    assert clock.seconds_per_token == 1.0


# Steps


def test_steps_start_from_the_same_context_every_time(rig):
    for nodes in (1, 8):
        first, again = (rig.run(rig.drafter(nodes), steps=3) for _ in range(2))
        assert first == again
        assert rig.cache.host_lengths == [20] * 3
        assert rig.cache.lengths.tolist() == [20] * 3


def test_a_context_that_does_not_fit_is_refused(tiny):
    heads = random_heads(tiny, "medusa", 2)
    with pytest.raises(ValueError, match=r"context \(8000 tokens\) and 193 rows .* give a smaller --context"):
        Rig(tiny, heads, batch=1, context=8000, room=193)


@pytest.mark.slow
def test_step_reports_a_row_per_batch_and_size(base_directory, tmp_path, capsys):
    words = [
        "step",
        "--base",
        str(base_directory),
        "--nodes",
        "4,2",
        "--batch",
        "1,3",
        "--context",
        "16",
        "--rounds",
        "2",
    ]
    files = ["--json", str(tmp_path / "new" / "step.json"), "--picture", str(tmp_path / "step.png")]
    assert main([*words, *files, "--baseline", "--profile", "--memory-steps", "10"]) == 0
    report = json.loads((tmp_path / "new" / "step.json").read_text())
    assert [(row["batch"], row["nodes"]) for row in report["rows"]] == [(b, n) for b in (1, 3) for n in (1, 2, 4)]
    for row in report["rows"]:
        assert row["verify_ms"] > 0
        assert len(row["rounds_step_ms"]) == 2
        passes = report["weight_bytes"] + row["batch"] * 16 * report["kv_bytes_per_token"]
        assert row["roofline_ms"] == pytest.approx(passes / report["bandwidth_gb_per_s"] / 1e6, rel=0.01, abs=1e-4)
    assert all(row["step_overhead"] == 1.0 for row in report["rows"] if row["nodes"] == 1)
    assert [row["batch"] for row in report["baseline"]] == [1, 3]
    assert all(row["plain_over_transformers"] > 0 for row in report["baseline"])
    assert sum(report["profile"]["shares"].values()) == pytest.approx(1.0, abs=0.02)
    assert [mark["steps"] for mark in report["memory"]] == [3, 6, 10]
    assert report["command"].startswith("medusa-bench step --base")
    assert (report["weights"], report["dtype"], report["threads"]) == ("real", "float32", torch.get_num_threads())
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "over N" in capsys.readouterr().out


def test_a_named_shape_runs_with_random_weights(monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "tiny", TINY.to_dict())
    words = ["--shape", "tiny", "--architecture", "medusa", "--rounds", "1", "--context", "8", "--dtype", "float32"]
    assert main(["step", *words, "--nodes", "4", "--baseline", "--json", str(tmp_path / "step.json")]) == 0
    report = json.loads((tmp_path / "step.json").read_text())
    assert (report["base"], report["weights"], report["heads"]) == ("tiny", "random", "5 medusa, random")
    assert report["weight_bytes"] == 4 * (2 * 7744 + 64 * 32 + 32)


def test_weights_of_8_bits_are_counted_and_called_lossy(monkeypatch, tmp_path, capsys):
    wide = TINY.to_dict() | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    monkeypatch.setitem(SHAPES, "tiny", wide)
    monkeypatch.setattr("medusa.cpu.int8.MIN_WEIGHTS", 256 * 128 + 1)
    words = ["step", "--shape", "tiny", "--int8", "--rounds", "1", "--context", "8", "--nodes", "2"]
    assert main([*words, "--dtype", "float32", "--json", str(tmp_path / "x.json")]) == 0
    rounded, too_small = 2 * (2 * 256 * 256 + 3 * 256 * 256), 2 * 2 * 256 * 128
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["weight_bytes"] == rounded + 4 * (too_small + 64 * 256 + 5 * 256)
    assert "LOSSY" in capsys.readouterr().out
    assert main([*words, "--baseline"]) == 1
    assert "same weights" in capsys.readouterr().err


# Replay


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


def test_replay_says_so_everywhere(base_directory, tmp_path, capsys):
    save_trace(Trace((1, 3, 9), {"drafter": "heads"}), tmp_path / "trace.json")
    words = ["--base", str(base_directory), "--nodes", "8", "--steps", "6", "--context", "16", "--rounds", "2"]
    files = ["--json", str(tmp_path / "replay.json"), "--picture", str(tmp_path / "replay.png")]
    assert main(["replay", "--trace", str(tmp_path / "trace.json"), "--batch", "1,2", *words, *files]) == 0
    report = json.loads((tmp_path / "replay.json").read_text())
    assert (report["kind"], report["label"]) == ("replay", "replay")
    assert report["trace"] == {"drafter": "heads", "tokens_per_step": 4.3333, "steps": 3}
    for row in report["rows"]:
        assert row["clamped_steps"] == 2 * row["batch"]
        assert row["replay_tokens_per_step"] == round((2 * (1 + 3) + 2 * (likely_tree(8, 5).depth + 1)) / 6, 4)
        expected = row["replay_tokens_per_step"] / row["step_overhead"]
        assert row["replay_speedup"] == pytest.approx(expected, rel=1e-3)
    assert "REPLAY" in capsys.readouterr().out
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


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
    trace = load_trace(EMBEDDED_TRACE)
    assert len(trace.emitted) > 100
    assert 1 < trace.tokens_per_step < 6
    assert trace.provenance["drafter"] == "heads"


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"format": "medusa-trace"}', '{"format": "medusa-trace", "emitted": [0]}']
)
def test_damaged_traces_are_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="record it again"):
        load_trace(tmp_path / "x.json")


# Attention


def test_attention_reports_every_backend_that_runs_beside_its_bound(base_directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(attention.LAYERS_BYTES, "cpu", 1 << 14)
    words = ["--base", str(base_directory), "--nodes", "1,4", "--batch", "2", "--context", "8", "--rounds", "1"]
    files = ["--json", str(tmp_path / "x.json"), "--picture", str(tmp_path / "x.png")]
    assert main(["attention", "--dtype", "float32", *words, *files]) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    sizes = [(row["backend"], row["nodes"]) for row in report["rows"] if row["backend"] == "reference"]
    assert sizes == [("reference", 1), ("reference", 4)]
    assert {row["backend"] for row in report["rows"]} | set(report["missing"]) == set(BACKENDS)
    for row in report["rows"]:
        # keys and values of 2 heads, queries and outputs of 4, all of 8 numbers of 4 bytes
        least = 2 * 8 * 4 * (2 * 2 * (8 + row["nodes"]) + 4 * 2 * row["nodes"])
        assert row["bound_ms"] == pytest.approx(least / report["bandwidth_gb_per_s"] / 1e6, rel=0.02, abs=1e-5)
        assert row["ms"] > 0
    assert "reference" in capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# Memory


def growing_decode(base, leak=None):
    """A production decode of one ever longer text; ``leak`` is handed every step's result."""
    heads = random_heads(base, "recurrent", 3)
    drafter = HybridDrafter(HeadsDrafter(heads, base, 6), PromptLookupDrafter(4))
    rig = Rig(base, heads, batch=1, context=4, room=8000)
    state = rig.state

    def step():
        nonlocal state
        result = decode_step(base, rig.cache, drafter, greedy, state)
        state = result.state
        if leak is not None:
            leak.append(torch.ones(10_000))

    return step


@pytest.mark.slow
def test_live_tensors_do_not_grow_with_steps_and_a_leak_is_seen(tiny):
    flat, leaking = (inside.watch_memory(growing_decode(tiny, leak), 30, CPU) for leak in (None, []))
    assert abs(flat[-1]["tensor_bytes"] - flat[0]["tensor_bytes"]) < 4000
    assert leaking[-1]["tensor_bytes"] - leaking[0]["tensor_bytes"] > 19 * 40_000


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_steps(tiny):
    flat, leaking = (inside.watch_memory(growing_decode(tiny, leak), 2000, CPU) for leak in (None, []))
    assert abs(flat[-1]["tensor_bytes"] - flat[0]["tensor_bytes"]) < 4000
    assert flat[-1]["resident_bytes"] - flat[0]["resident_bytes"] < 4 << 20
    assert leaking[-1]["resident_bytes"] - leaking[0]["resident_bytes"] > 32 << 20


# Wrong use


@pytest.mark.parametrize(
    "words",
    [
        [], ["step", "--nodes", "0"], ["step", "--nodes", "1,x"], ["step", "--batch", ""], ["step", "--rounds", "0"],
        ["step", "--base", "a", "--shape", "llama-1b"], ["replay", "--nodes", "1"], ["trace"], ["step", "--seed", "-1"],
    ],
)  # fmt: skip
def test_wrong_use_ends_with_status_2(words):
    with pytest.raises(SystemExit) as wrong:
        main(words)
    assert wrong.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--shape", "llama-9b"], "shape (llama-9b) is not known; choose one of: qwen3-0.6b"),
        (["step", "--device", "tpu9"], "device (tpu9) is not known"),
        (["replay", "--trace", "no/such.json"], "trace (no/such.json) does not exist"),
        (["step", "--base", "./no/such"], "base (./no/such) cannot be loaded"),
        (["trace", "--heads", "./no/such", "--out", "x.json"], "heads directory (./no/such) does not exist"),
    ],
)
def test_failures_are_one_sentence_and_status_1(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_the_parser_knows_all_names():
    assert set(arguments.ARCHITECTURES) == set(ARCHITECTURES)
    assert ("auto", *BACKENDS) == arguments.ATTENTION


def test_ctrl_c(monkeypatch):
    monkeypatch.setattr("serve.bench.shapes.choose_device", partial(_raise, KeyboardInterrupt))
    assert main(["step"]) == 130


def _raise(error, *_):
    raise error


def test_sizes_are_swept_beside_auto_and_plain(model, monkeypatch):
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: StepCosts((1, 16), (1.0, 1.1)))
    figures = measure_nodes(model, [[5, 6, 7], [8]], [8, 4, 1], "heads", max_new_tokens=20, rounds=2)
    rows = {row["nodes"]: row for row in figures["rows"]}
    assert list(rows) == ["plain", "auto", "4", "8"]
    assert rows["plain"]["tokens_per_step"] == rows["plain"]["speedup"] == 1.0
    assert rows["auto"]["tokens_per_step"] > 1.0
    assert all(len(row["rounds_tokens_per_s"]) == 2 for row in rows.values())
    assert figures["best_fixed"] in ("plain", "4", "8")
    assert figures["auto_over_plain"] == rows["auto"]["speedup"]


def test_the_sweep_of_sizes_from_the_command_line(model, base_directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: StepCosts((1, 16), (1.0, 1.1)))
    monkeypatch.setattr("data.prompts.embedded_prompts", lambda model, kind, count: [[5, 6, 7]] * count)
    model.save_pretrained(tmp_path / "heads")
    words = ["nodes", "--nodes", "4", "--count", "1", "--rounds", "1", "--max-new-tokens", "8", "--dtype", "float32"]
    for heads in (["--heads", str(tmp_path / "heads")], ["--base", str(base_directory)]):
        assert main([*words, *heads, "--json", str(tmp_path / "nodes.json")]) == 0
        report = json.loads((tmp_path / "nodes.json").read_text())
        assert (report["kind"], len(report["rows"])) == ("nodes", 3)
        assert report["heads"] == (heads[1] if heads[0] == "--heads" else "5 recurrent, random")
        assert "of the best fixed size" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--heads", str(tmp_path / "nothing")]) == 1
