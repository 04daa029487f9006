"""A rig starts from the same context every time; what is compared is measured side by side."""

from itertools import count

import pytest
import torch

from benchmarks.machine import ratio
from benchmarks.step.baseline import TokenClock
from benchmarks.step.rig import Rig
from benchmarks.step.shapes import random_heads
from benchmarks.step.step import pass_bytes
from medusa.budget.tree_search import typical_tree
from medusa.clock import alternate

CPU = torch.device("cpu")


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


def test_a_pass_reads_weights_once_and_each_cached_token(rig):
    assert pass_bytes(1000, 10, batch=2, context=5) == 1100
    assert rig.kv_bytes_per_token == 2 * 2 * (2 * 8) * 4


@pytest.mark.parametrize("nodes", [1, 2, 8, 64, 128])
def test_likely_trees_have_the_size_asked_for(nodes):
    tree = typical_tree(nodes, 5).tree
    assert tree.nodes == nodes
    assert tree.depth <= 5


def test_likely_trees_take_the_best_paths_first():
    # .5, then .25 below it, .2 beside it, .1 and .1 below these; rank 2 has .08
    assert typical_tree(6, 2).tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))


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
