"""What steps cost: made-up costs and the sizes that follow, measuring, and the file that keeps the figures."""

import json
import logging
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from medusa import MedusaModel
from medusa.acceptance import greedy
from medusa.budget.auto import FixedSize
from medusa.budget.cost import StepCosts, best_fixed
from medusa.budget.measure import GRID, busy, facts, known_costs, measure_passes, with_drafting
from medusa.budget.tree_search import typical_tree
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Output
from medusa.engine.step import decode_step
from tests.medusa.tape import Recorder

LINE = StepCosts((1, 3, 9), (1.0, 1.2, 1.8), begin=0.5, level=0.25)


def test_steps_between_measured_ones_lie_on_a_line():
    assert [LINE.step(nodes) for nodes in range(1, 10)] == pytest.approx([1 + 0.1 * n for n in range(9)])
    assert LINE.table.tolist()[1:] == pytest.approx([1 + 0.1 * n for n in range(9)])
    assert [LINE.draft(levels) for levels in range(4)] == [0, 0.5, 0.75, 1.0]
    with pytest.raises(ValueError, match=r"nodes \(10\) exceed the largest measured size \(9\)"):
        LINE.step(10)


def test_more_nodes_never_cost_less():
    assert StepCosts((1, 2, 4, 8, 16), (3.0, 1.0, 2.0, 5.0, 4.0)).seconds == (2.0, 2.0, 2.0, 4.5, 4.5)
    assert StepCosts((1, 2, 4), (1.0, 2.0, 3.0)).seconds == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("have", [1, 2, 4])
def test_nodes_are_worth_their_time(rate, have):
    """Against brute force, with costs that jump: a node may pay only together with those behind the jump."""
    costs = StepCosts((1, 2, 3, 4, 5, 6, 7), (1.0, 1.3, 1.31, 1.32, 1.8, 1.81, 1.9))
    for gains in product((0.9, 0.3, 0.05, 0.0), repeat=3):
        gains = sorted(gains, reverse=True)
        room = min(3, costs.most - have)
        nets = [sum(gains[:n]) - rate * (costs.step(have + n) - costs.step(have)) for n in range(room + 1)]
        count, net = costs.worth(torch.tensor(gains), rate, have)
        assert net == pytest.approx(max(nets), abs=1e-6)
        assert nets[count] == pytest.approx(max(nets), abs=1e-6)
    assert costs.worth(torch.tensor([1.0]), rate, nodes=7) == (0, 0.0)


def test_the_rate_settles_at_the_best_that_there_is():
    """Dinkelbach: whoever takes what pays at the present rate reaches the best rate of all sizes."""
    gains = 0.8 ** torch.arange(1, 60).double()
    costs = StepCosts((1, 8, 64), (1.0, 1.2, 4.0))
    rate = 1.0
    for _ in range(20):
        nodes = 1 + costs.worth(gains, rate)[0]
        rate = (1 + float(gains[: nodes - 1].sum())) / costs.step(nodes)
    best = max((1 + float(gains[: n - 1].sum())) / costs.step(n) for n in range(1, 61))
    assert rate == pytest.approx(best, rel=1e-9)


def test_typical_heads():
    probabilities = sorted(typical_tree(7, 2).survivals, reverse=True)
    assert [round(p, 4) for p in probabilities] == [0.5, 0.25, 0.2, 0.1, 0.1, 0.08]
    assert typical_tree(1, 4).tokens_per_step == 1.0
    assert typical_tree(4, 2).tokens_per_step == pytest.approx(1.95)


@pytest.mark.parametrize("seconds", [(1, 1, 1), (1, 1.01, 9), (1, 1.2, 1.3), (1, 5, 9)])
def test_the_best_fixed_size_has_the_most_tokens_per_second(seconds):
    costs = StepCosts((1, 4, 16), seconds)
    speeds = {nodes: typical_tree(nodes, 4).tokens_per_step / costs.step(nodes) for nodes in costs.nodes}
    assert best_fixed(costs, lambda nodes: typical_tree(nodes, 4).tokens_per_step) == max(speeds, key=speeds.get)


def answers(steps, per_step):
    return [Output(0, tokens=[0] * int(steps * per_step), steps=steps)]


def test_a_fixed_size_follows_the_answers_and_useless_drafts_are_rarely_tried():
    size = FixedSize(StepCosts((1, 8, 64), (1.0, 1.3, 2.5)), lambda nodes: typical_tree(nodes, 4).tokens_per_step)
    assert size.choose() == 64 or size.choose() == 8
    chosen = []
    for _ in range(300):
        chosen.append(size.choose())
        if chosen[-1] > 1:
            size.observe(chosen[-1], answers(100, 1.0))
    assert chosen[0] > 1
    assert sum(nodes > 1 for nodes in chosen) <= 12
    assert any(nodes > 1 for nodes in chosen[100:]), "tried again"
    while True:  # drafts become useful: sooner or later that is noticed
        nodes = size.choose()
        if nodes > 1:
            size.observe(nodes, answers(10_000, 3.0))
            break
    assert all(size.choose() > 1 for _ in range(5))


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": [2, 4], "seconds": [1.0, 2.0]},
        {"nodes": [1, 4, 4], "seconds": [1.0, 2.0, 3.0]},
        {"nodes": [1, 4], "seconds": [1.0]},
        {"nodes": [1], "seconds": [0.0]},
        {"nodes": [1], "seconds": [math.nan]},
        {"nodes": [1], "seconds": [1.0], "level": -1.0},
        {"nodes": ["1"], "seconds": [1.0]},
    ],
)
def test_impossible_costs_are_refused(fields):
    with pytest.raises(ValueError, match="measure them again"):
        StepCosts.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": [1], "seconds": 3}', '{"nodes": [1], "seconds": ["a"]}'])
def test_a_damaged_file_is_measured_again_and_replaced(text, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known_costs({"batch": 1}, lambda: LINE)
    (path,) = (tmp_path / "medusa").iterdir()
    path.write_text(text)
    assert known_costs({"batch": 1}, lambda: LINE) == LINE
    assert "measured again" in caplog.text
    assert StepCosts.from_json(path.read_text()) == LINE


def test_a_later_start_reads_what_an_earlier_one_measured(tmp_path, monkeypatch):
    def fail():
        raise AssertionError("measured twice")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_costs({"batch": 1}, lambda: LINE) == LINE
    assert known_costs({"batch": 1}, fail) == LINE
    other = StepCosts((1,), (1.0,))
    assert known_costs({"batch": 2}, lambda: other) == other


def test_threads_that_ask_at_once_share_one_measurement(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def measure():
        measured.append(time.sleep(0.2))
        return LINE

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: known_costs({"batch": 1}, measure), range(4))) == [LINE] * 4
    assert len(measured) == 1


def test_a_cache_that_cannot_be_written_fails_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert known_costs({"batch": 1}, lambda: LINE) == LINE
    assert "are not kept for the next start" in caplog.text


def test_costs_of_a_busy_machine_are_not_kept(monkeypatch, caplog):
    measured = []
    monkeypatch.setattr("medusa.budget.measure.busy", lambda: True)
    for _ in range(2):
        known_costs({"batch": "busy"}, lambda: measured.append(1) or LINE)
    assert len(measured) == 2
    assert "busy with other work" in caplog.text
    monkeypatch.setattr("medusa.budget.measure.busy", lambda: False)
    for _ in range(2):
        known_costs({"batch": "busy"}, lambda: measured.append(1) or LINE)
    assert len(measured) == 3


def test_a_machine_is_busy_by_its_load(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for load, expected in ((1.9, False), (3.5, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert busy() == expected


def test_costs_are_measured_with_the_loaded_base(base, make_heads, monkeypatch):
    monkeypatch.setattr("medusa.budget.measure.SECONDS", 0.0)
    monkeypatch.setattr("medusa.budget.measure.GRID", (1, 2, 4))
    monkeypatch.setattr("medusa.budget.measure.STEEP", math.inf)
    passes = measure_passes(base)
    costs = with_drafting(passes, base, make_heads())
    assert costs.nodes == passes.nodes == (1, 2, 4)
    assert costs.seconds == passes.seconds
    assert min(costs.seconds) > 1e-5
    assert costs.begin > 0
    assert costs.level >= 0  # on a busy machine a level may seem to take no time
    assert passes.draft(3) == 0.0


def test_a_slow_base_is_stepped_few_times(base, monkeypatch):
    """With a clock on which each step takes a second: the first answer must not wait for minutes."""
    clock, steps = [0.0], []

    def slow(*args):
        clock[0] += 1.0
        steps.append(args)
        return decode_step(*args)

    monkeypatch.setattr("medusa.budget.measure.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("medusa.engine.steps.decode_step", slow)
    costs = measure_passes(base)
    assert costs.nodes == GRID
    assert set(costs.seconds) == {1.0}
    assert len(steps) <= 2 * len(GRID)


def test_what_a_rule_computes_at_each_node_is_part_of_the_cost(base, make_heads, monkeypatch):
    """A rule that takes a second per node makes trees dear; settings that only differ in numbers share costs."""

    def dear(draft, logits, state):
        clock[0] += draft.tokens.shape[1]
        return greedy(draft, logits, state)

    clock, asked = [0.0], []
    monkeypatch.setattr("medusa.budget.measure.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("medusa.budget.measure.STEEP", math.inf)
    costs = measure_passes(base, rule=dear)
    assert costs.seconds == tuple(map(float, costs.nodes))
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, _: asked.append(known_by["work"]) or LINE)
    model = MedusaModel(base, make_heads())
    for settings in ({}, {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}):
        model.generate("abc", max_new_tokens=2, **settings)
    works = ["greedy", "sampling", "sampling, top_p, min_p"]
    assert asked == [work for work in works for _ in ("passes", "and heads")]


def test_trees_that_do_not_fit_into_memory_are_no_choice(base, monkeypatch):
    def small(base, cache, drafter, *rest):
        if drafter.nodes > 4:
            raise torch.OutOfMemoryError
        return decode_step(base, cache, drafter, *rest)

    monkeypatch.setattr("medusa.budget.measure.SECONDS", 0.0)
    monkeypatch.setattr("medusa.budget.measure.STEEP", math.inf)
    monkeypatch.setattr("medusa.engine.steps.decode_step", small)
    assert max(measure_passes(base).nodes) == 4


def test_several_sequences_cost_what_their_rows_cost():
    costs = StepCosts((1, 2, 4, 8), (1.0, 1.0, 1.5, 2.5), begin=0.5, level=0.25)
    assert costs.batched(1) is costs
    two = costs.batched(2)
    assert (two.nodes, two.seconds) == ((1, 2, 4), (1.0, 1.5, 2.5)), "8 x 2 rows: 4.5 s, steeper than 4 plain steps"
    assert (two.begin, two.level) == (1.0, 0.5)
    assert costs.batched(16).seconds[0] == pytest.approx(2.5 + 8 * 0.25), "beyond what was measured on a straight line"


def test_steep_trees_are_not_measured(base, monkeypatch):
    monkeypatch.setattr("medusa.budget.measure.SECONDS", 0.0)
    monkeypatch.setattr("medusa.budget.measure.STEEP", 1e-9)
    assert measure_passes(base).nodes == (1,)


def test_costs_belong_to_what_they_depend_on(base, make_heads):
    medusa, recurrent = (make_heads(architecture=name) for name in ("medusa", "recurrent"))
    known = [
        facts(base, medusa, 1, "host", "greedy"), facts(base, recurrent, 1, "host", "greedy"),
        facts(base, medusa, 2, "host", "greedy"), facts(base, None, 1, "host", "greedy"),
        facts(base, medusa, 1, "graphs", "greedy"), facts(base, medusa, 1, "host", "sampling, top_p"),
    ]  # fmt: skip
    assert len({json.dumps(known_by, sort_keys=True) for known_by in known}) == len(known)


@pytest.mark.parametrize("seconds", [(1.0, 1.1, 1.2), (1.0, 9.0, 9.0)])
def test_where_shapes_are_fixed_a_whole_answer_has_one_size(base, make_heads, monkeypatch, caplog, seconds):
    model, plain = MedusaModel(base, make_heads(), StepGraphs(base, Recorder())), MedusaModel(base)
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: StepCosts((1, 8, 16), seconds))
    with caplog.at_level(logging.INFO, "medusa.budget.auto"):
        output = model.generate([5, 6, 7], max_new_tokens=20)
    assert output.tokens == plain.generate([5, 6, 7], max_new_tokens=20).tokens
    assert f"nodes auto: {1 if seconds[1] > 8 else 16} for hybrid, batch of 1" in caplog.text


def test_recorded_steps_are_measured_too(base, make_heads, monkeypatch):
    monkeypatch.setattr("medusa.budget.measure.SECONDS", 0.0)
    monkeypatch.setattr("medusa.budget.measure.FIXED_GRID", (1, 4))
    monkeypatch.setattr("medusa.budget.measure.ROUNDS", 1)
    monkeypatch.setattr("medusa.budget.auto.known_costs", known_costs)
    model = MedusaModel(base, make_heads(), StepGraphs(base, recorder := Recorder()))
    prompts = [[5, 6, 7], [8]]
    assert [o.tokens for o in model.generate(prompts, max_new_tokens=12)] == [
        o.tokens for o in model.generate(prompts, max_new_tokens=12, nodes=1)
    ]
    assert recorder.recorded >= 2


def test_a_base_that_verifies_chains_learns_what_its_chains_bring(base, make_heads, monkeypatch):
    """A chain has fewer nodes than its size allows; what is expected of the size must still become what was seen."""
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: StepCosts((1, 64), (1.0, 1.2)))
    monkeypatch.setattr("medusa.budget.auto.DOUBT", 1e-6)
    model = MedusaModel(base.with_traits(decoding="chain"), make_heads())
    output = model.generate([5, 6, 7], max_new_tokens=40, drafter="heads")
    (size,) = model.drafters._auto._fixed.values()
    assert size.tokens_per_step(64) == pytest.approx(output.tokens_per_step, rel=1e-3)


def test_what_auto_means_is_always_said(base, make_heads):
    assert MedusaModel(base).explain_nodes() == "nodes auto: 1, plain decoding"
    model = MedusaModel(base, make_heads())
    assert "as many of at most 64 as pay" in model.explain_nodes()
    plainly = MedusaModel(base.with_traits(decoding="plain"), make_heads())
    assert plainly.explain_nodes() == "nodes auto: 1, plain decoding"
