"""Drafts sized by prices: on engines of a few lines whose best sizes are known, and on a real base."""

import dataclasses
import math
from itertools import zip_longest
from types import SimpleNamespace

import pytest
import torch

from medusa import MedusaModel
from medusa.budget.cost import StepCosts
from medusa.budget.priced import BackOff, PricedDrafter
from medusa.budget.record import Average, agreement
from medusa.drafters import HeadsDrafter, PlainDrafter
from medusa.state import DecodeState
from medusa.tree import Draft

PROMPTS = [[5, 6, 7, 5, 6, 8, 5], [40], [9, 9, 9]]
LAW = (0.55, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01)
"""Of every next token, whatever stands before it: token k has the k-th probability."""
SHAPES = {
    "flat": StepCosts((1, 8, 16, 32), (1.0, 1.02, 1.05, 1.1), begin=0.05, level=0.05),
    "knee": StepCosts((1, 8, 9, 32), (1.0, 1.1, 1.6, 4.0), begin=0.1, level=0.1),
    "line": StepCosts((1, 32), (1.0, 3.0), begin=0.1, level=0.15),
    "steep": StepCosts((1, 4, 32), (1.0, 2.5, 16.0), begin=0.3, level=0.3),
}


class LawHeads:
    """Four heads that say the same law everywhere, sharpened where they are too sure of themselves."""

    def __init__(self, law=LAW, sharp=1.0):
        self.config = SimpleNamespace(num_heads=4, output_size=len(law))
        self.logits, self.drafted = sharp * torch.tensor(law).log(), 0

    def parameters(self):
        yield self.logits

    def begin(self, hidden, vocabulary):
        self.drafted += 1
        return hidden

    def level(self, head, state, parents_Bm, tokens_Bm, vocabulary):
        return self.logits.expand(*tokens_Bm.shape, -1), state

    def token_ids(self, columns):
        return columns


class Engine:
    """Steps through texts that are written already; time is what the costs say.

    A draft is accepted as far as it agrees with the text, which is all that a lossless rule does.
    """

    def __init__(self, costs, heads, tokens=400, batch=1, law=LAW):
        generator = torch.Generator().manual_seed(0)
        self.costs, self.heads, self.tokens = costs, heads, tokens
        self.history = torch.multinomial(torch.tensor(law), batch * (tokens + 50), True, generator=generator)
        self.history, self.seconds = self.history.view(batch, -1), 0.0

    def speed(self, drafter):
        """Tokens per second and sequence."""
        batch, self.seconds = len(self.history), 0.0
        positions, active = torch.zeros(batch, dtype=torch.int64), torch.ones(batch, dtype=torch.bool)
        while active.any():
            roots = self.history.gather(1, positions[:, None])[:, 0]
            state = DecodeState(roots, torch.zeros(batch, 1), active, self.history, positions, roots, roots)
            draft = drafter.propose(state)
            texts = [row[p + 1 :].tolist() for row, p in zip(self.history, positions.tolist(), strict=True)]
            accepted = torch.tensor(agreement(draft, texts))
            positions = torch.where(active, positions + accepted + 1, positions)
            active = positions < self.tokens
            levels = getattr(drafter, "_sizes", None)
            levels = levels.levels if levels and drafter._last.tree is not None else self.fixed_levels(drafter)
            self.seconds += self.costs.step(draft.tokens.shape[1]) + self.costs.draft(levels)
        return float(positions.float().mean()) / self.seconds

    def fixed_levels(self, drafter):
        return drafter._shape.depth if isinstance(drafter, HeadsDrafter) else 0

    def fixed(self, nodes):
        """A drafter of always so many nodes."""
        return HeadsDrafter(self.heads, None, nodes, host_decides=False) if nodes > 1 else PlainDrafter()


@pytest.mark.parametrize(
    ("shape", "sharp"),
    [
        ("knee", 2.0),
        ("steep", 1.0),
        *(pytest.param(shape, sharp, marks=pytest.mark.slow) for shape in SHAPES for sharp in (1.0, 2.0)),
    ],
)
def test_sizes_by_prices_are_as_good_as_the_best_fixed_size(shape, sharp):
    """Even where heads are too sure of themselves."""
    engine = Engine(SHAPES[shape], LawHeads(sharp=sharp))
    fixed = {nodes: engine.speed(engine.fixed(nodes)) for nodes in (1, 2, 4, 8, 16, 32)}
    auto = engine.speed(PricedDrafter(SHAPES[shape], None, engine.heads, lookup=False))
    best = max(fixed, key=fixed.get)
    assert auto >= 0.97 * fixed[best], f"{auto:.3f} against {fixed[best]:.3f} at N = {best}"
    assert (best == 1) == (shape == "steep"), "both cases are seen"


def test_useless_heads_are_hardly_ever_asked():
    """They are sure of a token that never comes; the bound is a number of drafts and of modelled seconds."""
    heads = LawHeads(law=(1e-9,) * 7 + (1.0,))
    engine = Engine(SHAPES["line"], heads, tokens=1500, law=(0.5, 0.5, 0, 0, 0, 0, 0, 0))
    speed = engine.speed(PricedDrafter(SHAPES["line"], None, heads, lookup=False))
    assert speed >= 0.97
    assert 0 < heads.drafted <= 40
    first = Engine(SHAPES["line"], LawHeads(law=(1e-9,) * 7 + (1.0,)), tokens=128, law=(0.5, 0.5, 0, 0, 0, 0, 0, 0))
    assert first.speed(PricedDrafter(SHAPES["line"], None, first.heads, lookup=False)) >= 0.95


def test_drafts_that_take_longer_than_they_are_priced_are_left_out():
    """Priced by one machine, stepped on another where trees are dear: the clock finds it out."""
    priced, real = SHAPES["knee"], StepCosts((1, 8, 32), (1.0, 3.0, 9.0), begin=0.3, level=0.3)
    engine = Engine(real, LawHeads(), tokens=1500)
    blind = engine.speed(PricedDrafter(priced, None, engine.heads, lookup=False))
    seeing = engine.speed(PricedDrafter(priced, None, engine.heads, lookup=False, clock=lambda: engine.seconds))
    assert blind < 0.8
    assert seeing > 0.95, "plain decoding is 1"
    same = Engine(priced, LawHeads(), tokens=1500)
    speeds = [
        same.speed(PricedDrafter(priced, None, same.heads, lookup=False, clock=clock))
        for clock in (None, lambda: same.seconds)
    ]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.02), "prices that hold are left alone"


def test_pauses_grow_and_end_when_heads_earn_again():
    trials, rests = BackOff(1.0), []
    for _ in range(5):
        while trials.draft(1.0):
            trials.add(0.0, 0.5)
        rests.append(1)
        while not trials.draft(1.0):
            rests[-1] += 1
        trials.add(0.0, 0.5)
    assert rests == [32, 64, 128, 256, 512]
    for _ in range(200):
        assert trials.draft(1.0)
        trials.add(1.0, 0.5)
    assert trials.earnings > 1.5
    while trials.draft(1.0):
        trials.add(0.0, 0.5)
    assert sum(not trials.draft(1.0) for _ in range(40)) == 31, "after good times, the first rest is short again"


def test_a_chain_is_drafted_as_long_as_such_chains_were_right():
    """A text with a period, then noise with matches that mislead, then the period again."""
    costs = StepCosts((1, 16), (1.0, 2.5))
    period = [1, 2, 3, 4, 5, 6, 7] * 60
    noise = torch.randint(2, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine(costs, None, tokens=len(period))
    drafter = PricedDrafter(costs, None)
    speeds = []
    for text in (period, noise, period):
        engine.history, engine.tokens = torch.tensor([text + [0] * 20]), len(text) - 20
        speeds.append(engine.speed(drafter))
    assert speeds[0] > 3
    assert speeds[1] > 0.85, "noise of two tokens is full of matches that say nothing"
    assert speeds[2] > 3, "chains are judged even when they are not verified"


def test_averages_forget():
    average = Average(0.5, 10.0)
    assert average.value == 0.5
    for _ in range(2000):
        average.add(3.0, 2.0)
    assert average.value == pytest.approx(1.5, rel=0.05)
    for _ in range(2000):
        average.add(0.0, 2.0)
    assert average.value < 0.05


def test_agreement_follows_the_tree():
    draft = Draft.of(torch.tensor([[0, 5, 6, 7, 7, 8]]), torch.tensor([[0, 0, 0, 1, 2, 4]]), 3)
    for text, depth in (([5, 7, 8], 2), ([6, 7, 8, 9], 3), ([6, 7], 2), ([7], 0), ([], 0), ([6, 8], 1)):
        assert agreement(draft, [text]) == [depth]


def test_finished_sequences_have_no_say(base, make_heads):
    costs = SHAPES["line"]
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(base.vocab_size, (2, 40), generator=generator)
    positions = torch.tensor([20, 20])
    hidden = torch.randn(2, base.hidden_size, dtype=base.dtype, generator=generator)
    both = DecodeState(history[:, 20], hidden, torch.tensor([True, True]), history, positions, positions, positions)
    for row in (0, 1):
        alone = DecodeState(*(getattr(both, field.name)[row : row + 1] for field in dataclasses.fields(both)))
        others = dataclasses.replace(both, active=torch.arange(2) == row)
        drafts = [PricedDrafter(costs, base, make_heads(3)).propose(state) for state in (alone, others)]
        assert drafts[1].tokens[row].tolist() == drafts[0].tokens[0].tolist()


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batch", "single"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("drafter", [None, "heads", "prompt-lookup"])
@pytest.mark.parametrize("shape", ["flat", "steep"])
def test_text_is_that_of_plain_decoding(model, monkeypatch, prompts, options, drafter, shape):
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: SHAPES[shape])
    options = {"max_new_tokens": 60} | options
    plain = model.generate(prompts, nodes=1, **options)
    fresh = MedusaModel(model.base, model.heads)
    outputs = [fresh.generate(prompts, drafter=drafter, **options) for _ in range(2)]
    assert all([o.tokens for o in out] == [o.tokens for o in plain] for out in outputs)
    if shape == "flat" and not options.get("temperature"):
        assert sum(o.steps for o in outputs[0]) < sum(o.steps for o in plain)


def test_a_run_can_be_repeated(model, monkeypatch):
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: SHAPES["flat"])
    runs = []
    for _ in range(2):
        fresh = MedusaModel(model.base, model.heads)
        runs.append([fresh.generate(prompt, max_new_tokens=50).steps for prompt in PROMPTS])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
def test_heads_that_overflow_change_no_text(base, make_heads, model, monkeypatch, value):
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: SHAPES["flat"])
    heads = make_heads()
    heads.blocks[0].outer.weight.data *= value
    outputs = MedusaModel(base, heads).generate(PROMPTS, max_new_tokens=40)
    assert [o.tokens for o in outputs] == [o.tokens for o in model.generate(PROMPTS, max_new_tokens=40, nodes=1)]
    assert not any(math.isnan(o.tokens_per_step) for o in outputs)


def test_answers_that_grow_side_by_side_learn_all_the_same(base, make_heads, monkeypatch):
    """As two streams do: whether heads earn their time must be seen although each step follows one of the other."""
    monkeypatch.setattr("medusa.budget.auto.known_costs", lambda known_by, measure: SHAPES["steep"])
    model, drafts = MedusaModel(base, make_heads()), []
    begin = model.heads.begin
    monkeypatch.setattr(model.heads, "begin", lambda *args: drafts.append(args) or begin(*args))
    options = {"max_new_tokens": 120, "drafter": "heads", "logit_bias": {0: -100.0}}
    streams = [model.stream(prompt, **options) for prompt in PROMPTS[:2]]
    for _ in zip_longest(*streams):
        pass
    assert min(stream.output.steps for stream in streams) > 60
    assert 0 < len(drafts) < 40
