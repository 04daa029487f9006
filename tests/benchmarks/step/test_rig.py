"""A rig starts from the same context; what is compared is measured side by side."""

from itertools import count

import pytest

from medusa import Speculation
from medusa.benchmarks.machine import ratio
from medusa.benchmarks.step.rig import PLAIN, FreeDrafter, Rig, Sizes, typical_tree
from medusa.benchmarks.step.step import measure_steps
from medusa.clock import alternate


def texts(rig, speculation, steps=6):
    """Tokens of each sequence after so many steps."""
    batch = rig.begin(speculation)
    completions = list(batch.step())
    for _ in range(steps - 1):
        batch.step()
    return [completion.output.tokens for completion in completions]


@pytest.mark.parametrize(
    "speculation", [PLAIN, Speculation(tree=typical_tree(8, 4)), None], ids=["plain", "heads", "free"]
)
def test_steps_write_what_plain_decoding_writes_every_time(tiny_model, speculation):
    if speculation is None:
        speculation = Speculation(drafter=FreeDrafter(typical_tree(8, 4), tiny_model.base.device))
    rig = Rig(tiny_model, batch=3, context=20)
    plain = texts(rig, PLAIN, steps=30)
    for _ in range(2):
        found = texts(rig, speculation)
        assert [len(tokens) >= 7 for tokens in found] == [True] * 3
        assert [whole[: len(tokens)] for whole, tokens in zip(plain, found, strict=True)] == found


def test_a_context_that_does_not_fit_is_refused(tiny_model):
    with pytest.raises(ValueError, match=r"context \(8100 tokens\) and 180 tokens .* give a smaller --context"):
        Rig(tiny_model, batch=1, context=8100)


def test_a_projection_is_tokens_by_the_cost_of_a_step(tiny_model):
    report = measure_steps(tiny_model, Sizes([4], [2], context=16, rounds=1), tokens_per_step=2.5)
    plain, tree = report["rows"]
    assert plain["projected_speedup"] == plain["step_overhead"] == 1.0
    assert tree["projected_speedup"] == pytest.approx(2.5 / tree["step_overhead"], rel=1e-3)
    assert tree["projected_tokens_per_s"] == pytest.approx(2 * 2.5 * 1e3 / tree["step_ms"], rel=1e-3)


@pytest.mark.parametrize("nodes", [1, 2, 8, 64, 128])
def test_likely_trees_have_the_size_asked_for(nodes):
    tree = typical_tree(nodes, 5)
    assert tree.nodes == nodes
    assert tree.depth <= 5


def test_likely_trees_take_the_best_paths_first():
    # .5, then .25 below it, .2 beside it, .1 and .1 below these; rank 2 has .08
    assert typical_tree(6, 2).paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))


def test_rounds_begin_with_another_sample_and_the_first_does_not_count():
    calls = []
    clock = count()
    samples = {name: lambda name=name: (calls.append(name), next(clock))[1] for name in "abc"}
    times = alternate(samples, rounds=2)
    assert calls == list("cababcbca")
    assert times == {"a": [3, 8], "b": [4, 6], "c": [5, 7]}


def test_ratios_are_taken_within_rounds():
    assert ratio([2.0, 20.0, 3.0], [1.0, 10.0, 30.0]) == 2.0
