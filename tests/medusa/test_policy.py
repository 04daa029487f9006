"""Tree sizes that nobody gives: on machines of a few lines whose best sizes are known, and on a real base."""

import logging
import random
from itertools import zip_longest

import pytest

from medusa import MedusaModel
from medusa.budget.auto import AutoDrafter
from medusa.budget.policy import PLAIN, Arm, Policy
from medusa.budget.policy import SIZES as DRAFTED
from medusa.drafters import PlainDrafter
from medusa.drafters.build import split
from medusa.drafters.choose import Drafters
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Output
from medusa.sampling import Speculation
from tests.medusa.passes import prefill
from tests.medusa.rules import make_rule
from tests.medusa.tape import Recorder

SIZES = (1, *DRAFTED)
PROMPTS = [[5, 6, 7, 5, 6, 8, 5], [40], [9, 9, 9]]
FLAT = dict(zip(SIZES, (1.0, 1.02, 1.04, 1.08, 1.12, 1.2, 1.4), strict=True))
KNEE = dict(zip(SIZES, (1.0, 1.05, 1.1, 1.15, 2.5, 4.0, 8.0), strict=True))
STEEP = dict(zip(SIZES, (1.0, 1.9, 3.0, 5.0, 9.0, 18.0, 36.0), strict=True))
"""Seconds of a step by its size."""
GOOD = dict(zip(SIZES, (0.0, 0.4, 0.55, 0.62, 0.67, 0.7, 0.72), strict=True))
"""How likely each level of a tree is right below a right one, four levels at most."""
USELESS = dict.fromkeys(SIZES, 0.0)


def climber(start, batch=1):
    """A policy of one drafter."""
    return Policy({"heads": DRAFTED}, start, batch)


def arm(nodes):
    return PLAIN if nodes == 1 else Arm("heads", nodes)


class Machine:
    """Steps of drafts that are right by chance, on a clock of its own."""

    def __init__(self, seconds, right, batch=1):
        self.seconds, self.right, self.batch, self.now, self.chance = seconds, right, batch, 0.0, random.Random(0)

    def accepted(self, nodes):
        depth = 0
        while depth < min(4, nodes - 1) and self.chance.random() < self.right[nodes]:
            depth += 1
        return depth

    def tokens(self, nodes):
        return sum(1 + self.accepted(nodes) for _ in range(self.batch)) / self.batch

    def speed(self, policy, steps):
        """Tokens per second of so many steps, and how many of them had each size."""
        began, emitted, counts = self.now, 0.0, dict.fromkeys(SIZES, 0)
        for _ in range(steps):
            chosen = policy.choose()
            nodes = chosen.nodes
            tokens, seconds = self.tokens(nodes), self.seconds[nodes]
            policy.observe(chosen, tokens, seconds)
            emitted, self.now, counts[nodes] = emitted + tokens, self.now + seconds, counts[nodes] + 1
        return emitted / (self.now - began), counts

    def fixed(self, nodes):
        right = self.right[nodes]
        return (1 + sum(right**level for level in range(1, 1 + min(4, nodes - 1)))) / self.seconds[nodes]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("seconds", [FLAT, KNEE, STEEP], ids=["flat", "knee", "steep"])
@pytest.mark.parametrize("start", [1, 64])
def test_the_fastest_size_is_found_from_anywhere(seconds, start, batch):
    machine, policy = Machine(seconds, GOOD, batch), climber(start, batch)
    machine.speed(policy, 600)
    speed, _ = machine.speed(policy, 3000)
    best = max(machine.fixed(nodes) for nodes in SIZES)
    assert speed >= 0.9 * best


def test_useless_drafts_give_way_to_plain_decoding_at_once():
    machine, policy = Machine(KNEE, USELESS), climber(8)
    speed, _ = machine.speed(policy, 128)
    assert speed >= 0.93, "plain decoding is 1"
    speed, counts = machine.speed(policy, 5000)
    assert speed >= 0.995
    assert 0 < counts[2] < 100, "tried again, ever more rarely"


def test_the_size_follows_the_text():
    machine, policy = Machine(FLAT, GOOD), climber(8)
    machine.speed(policy, 500)
    machine.right = USELESS
    machine.speed(policy, 1200)
    assert policy.arm == PLAIN
    machine.right = GOOD
    machine.speed(policy, 3000)
    assert policy.arm.nodes >= 4


def test_the_size_follows_the_machine():
    """Other work makes larger passes dear; when it has ended, they are taken again."""
    machine, policy = Machine(KNEE, GOOD), climber(8)
    machine.speed(policy, 500)
    assert policy.arm.nodes == 8
    machine.seconds = STEEP
    machine.speed(policy, 1500)
    assert policy.arm == PLAIN
    machine.seconds = KNEE
    machine.speed(policy, 3000)
    assert policy.arm.nodes in (4, 8)


class Held(dict):
    """Seconds of a machine on which something else runs: a third of the steps is held up."""

    chance = random.Random(1)

    def __getitem__(self, nodes):
        return super().__getitem__(nodes) * (self.chance.choice([3.0, 6.0, 20.0]) if self.chance.random() < 0.3 else 1)


@pytest.mark.parametrize("seconds", [FLAT, KNEE, STEEP], ids=["flat", "knee", "steep"])
def test_a_busy_neighbour_does_not_mislead(seconds):
    quiet, machine, policy = Machine(seconds, GOOD), Machine(Held(seconds), GOOD), climber(8)
    machine.speed(policy, 1000)
    _, counts = machine.speed(policy, 3000)
    expected = sum(quiet.fixed(nodes) * count for nodes, count in counts.items()) / sum(counts.values())
    assert expected >= 0.9 * max(quiet.fixed(nodes) for nodes in SIZES)


def test_all_that_becomes_slower_at_once_changes_nothing():
    machine, policy = Machine(KNEE, GOOD), climber(8)
    machine.speed(policy, 1000)
    machine.seconds = {nodes: 2.5 * seconds for nodes, seconds in KNEE.items()}
    _, counts = machine.speed(policy, 1000)
    assert counts[8] + counts[4] >= 800


def test_a_step_that_was_held_up_and_the_first_of_a_size_decide_nothing():
    policy = climber(8)
    policy.observe(arm(8), 2.0, 1000.0)  # compiles
    for _ in range(11):
        policy.observe(arm(8), 2.0, 1.0)
    policy.observe(arm(8), 2.0, 1000.0)  # is held up
    assert policy.choose() == PLAIN, "plain decoding is tried first"
    for _ in range(3):
        policy.observe(PLAIN, 1.0, 0.9)
    assert policy.arm == policy.choose() == arm(8)


def test_another_drafter_takes_over_where_it_is_faster_and_gives_way_again():
    """Heads that are right sometimes; a lookup that is nearly always right while the text repeats itself."""
    policy = Policy({"heads": DRAFTED, "lookup": (6,)}, 8, 1)
    chance, now = random.Random(0), {"repeats": False}

    def run(steps):
        tokens = seconds = 0.0
        for _ in range(steps):
            chosen = policy.choose()
            if chosen.drafter == "lookup":
                got, took = (5.0 if now["repeats"] else 1.0), 1.05
            else:
                right = GOOD[chosen.nodes]
                got, took = 1.0 + sum(chance.random() < right**level for level in range(1, 4)), KNEE[chosen.nodes]
            policy.observe(chosen, got if chosen != PLAIN else 1.0, took)
            tokens, seconds = tokens + got, seconds + took
        return tokens / seconds

    run(600)
    assert policy.arm.drafter == "heads"
    now["repeats"] = True
    run(1200)
    assert policy.arm == Arm("lookup", 6)
    assert run(1000) > 4
    now["repeats"] = False
    run(1000)
    assert policy.arm.drafter == "heads"
    assert str(policy).startswith("heads ") and "lookup 6: " in str(policy) and "plain: " in str(policy)


def test_the_first_size_is_one_that_there_is():
    assert [climber(start).choose().nodes for start in (0, 1, 3, 9, 100)] == [1, 2, 2, 8, 64]


def test_sequences_that_have_ended_are_not_counted(base):
    seen, policy = [], climber(8, 2)
    policy.observe = lambda *observed: seen.append(observed)
    drafter = AutoDrafter(policy, lambda arm: PlainDrafter(), [arm(64)])
    drafter.propose(prefill(base, [[1, 2, 3], [4, 5]])[1])
    drafter.observe([0, 3], 0.5)
    drafter.observe([0, 0], 0.5)
    drafter.observe([1, 3], 0.5)
    assert seen == [(arm(8), 3.0, 0.5), (arm(8), 2.0, 0.5)]


@pytest.mark.parametrize(
    ("prompts", "options"), [(PROMPTS, {"temperature": 1.0, "seed": 3}), (PROMPTS[:1], {})], ids=["sampling", "greedy"]
)
@pytest.mark.parametrize("drafter", [None, "heads", "prompt-lookup"])
def test_text_is_that_of_plain_decoding(model, prompts, options, drafter):
    options = {"max_new_tokens": 40} | options
    plain = model.generate(prompts, nodes=1, **options)
    outputs = [model.generate(prompts, drafter=drafter, **options) for _ in range(2)]
    assert all([o.tokens for o in out] == [o.tokens for o in plain] for out in outputs)
    if len(prompts) == 1:
        assert sum(o.steps for o in outputs[0]) < sum(o.steps for o in plain), (
            "the first steps draft, whatever the clock"
        )


def test_streams_that_grow_side_by_side_share_what_is_learned(base, make_heads):
    model = MedusaModel(base, make_heads())
    options = {"max_new_tokens": 60, "drafter": "heads", "logit_bias": {0: -100.0}}
    streams = [model.stream(prompt, **options) for prompt in PROMPTS[:2]]
    for _ in zip_longest(*streams):
        pass
    assert "hybrid" not in (said := model.explain("heads"))
    assert "heads 4: " in said and "plain: " in said


def test_where_shapes_are_fixed_a_whole_completion_has_one_size(base, make_heads):
    """Completions count as their steps do."""
    drafters, rule, asked = Drafters(base, make_heads(), fixed_shapes=True), make_rule(None), Speculation("heads")
    machine, sizes = Machine(STEEP, USELESS), []
    for _ in range(40):
        drafter = drafters.choose(asked, 1, rule)
        sizes.append(drafter.nodes)
        output = Output(0, tokens=[0] * 50, steps=50, seconds=50 * machine.seconds[drafter.nodes])
        drafters.observe(drafter, asked, rule, 1, [5], output)
    assert sizes[0] == 4
    assert sizes.count(1) >= 28
    assert set(sizes[-4:]) <= {1, 2}
    alone = Drafters(base, None, fixed_shapes=True)
    assert alone.choose(Speculation(nodes=6), 1, rule).nodes == 6, "prompt lookup, where a size is given"


def test_recorded_steps_choose_their_size_too(base, make_heads, caplog):
    model, plain = MedusaModel(base, make_heads(), StepGraphs(base, Recorder())), MedusaModel(base)
    with caplog.at_level(logging.INFO, "medusa.drafters.choose"):
        outputs = [model.generate([5, 6, 7], max_new_tokens=10) for _ in range(3)]
    expected = plain.generate([5, 6, 7], max_new_tokens=10).tokens
    assert [output.tokens for output in outputs] == [expected] * 3
    assert "auto, batch of 1: hybrid 4 now" in caplog.text


def test_what_auto_means_is_always_said(base, make_heads):
    assert MedusaModel(base).explain().startswith(f"auto, batch of 1: prompt-lookup {base.cheap_rows} now")
    assert MedusaModel(base.with_traits(decoding="plain")).explain() == "auto: plain decoding"
    model = MedusaModel(base, make_heads())
    assert model.explain() == "auto, batch of 1: hybrid 4 now, others are tried as it runs"
    model.generate([5, 6, 7], max_new_tokens=60, logit_bias={0: -100.0})
    assert "(tokens per second: hybrid " in model.explain()
    assert "so that a seed gives the same text again" in model.explain("heads-sampled")


@pytest.mark.parametrize(
    ("recorded", "drafting"),
    [
        (True, {}), (True, {"drafter": "early-exit", "nodes": 4}), (False, {"heads": "deep", "nodes": 8}),
    ],
    ids=str,
)  # fmt: skip
def test_heads_that_come_later_read_layers_that_nobody_read_before(base, make_heads, recorded, drafting):
    """Hidden states become wider; what the first model keeps between calls is not the second one's."""
    model = MedusaModel(base, make_heads(), StepGraphs(base, Recorder()) if recorded else None)
    options = {"max_new_tokens": 10, "drafter": drafting.get("drafter"), "nodes": drafting.get("nodes")}
    turns = 1 if drafting else 3  # sizes that are left open change from turn to turn
    before = [model.generate(PROMPTS, **options) for _ in range(turns)]
    wider = model.with_heads({"deep": make_heads(feature_layers=(1,))})
    after = [wider.generate(PROMPTS, max_new_tokens=10, **drafting) for _ in range(turns)]
    after.append(model.generate(PROMPTS, **options))
    assert wider.drafters.parts.base is wider.base
    expected = [output.tokens for output in MedusaModel(base).generate(PROMPTS, max_new_tokens=10, nodes=1)]
    assert [[output.tokens for output in outputs] for outputs in (*before, *after)] == [expected] * (2 * turns + 1)


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize(
    "names", [("heads",), ("prompt-lookup", "heads"), ("prompt-lookup", "ngram", "draft-model", "mtp")], ids=len
)
def test_where_shapes_are_fixed_sources_share_the_nodes(names, nodes):
    shares = split(names, nodes, side_by_side=True)
    assert min(shares.values()) >= 2, "each guesses something, or is left out"
    assert 1 + sum(share - 1 for share in shares.values()) <= nodes
    assert names[-1] in shares or nodes == 2, "costly ones come first"
    assert set(split(names, nodes, side_by_side=False)) == set(names)
