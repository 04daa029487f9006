"""Steps as CUDA graphs write what eager steps write, wait for nothing, and hold their memory."""

import dataclasses
import logging

import pytest
import torch

from medusa import MedusaModel, Prefix
from medusa.drafters import HeadsDrafter, HybridDrafter, PlainDrafter, PromptLookupDrafter, SampledHeadsDrafter
from medusa.engine.graph import StepGraphs
from tests.gpu.test_decode import load
from tests.medusa.kinds import REMEMBER
from tests.medusa.passes import prefill
from tests.medusa.rules import make_rule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

PROMPTS = [[5, 6, 7, 5, 6, 8, 5], [40], list(range(1, 60))]
SETTINGS = {
    "greedy": {"repetition_penalty": 1.1},
    "sampling": {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logit_bias": {7: 2.0}},
    "speculative": {"temperature": 0.9, "top_k": 50, "seed": 5, "acceptance": "speculative"},
    "typical": {"temperature": 0.9, "seed": 5, "acceptance": "typical"},
}
DRAFTERS = {
    "plain": lambda model: PlainDrafter(),
    "heads": lambda model: HeadsDrafter(model.heads, model.base, 24, host_decides=False),
    "hybrid": lambda model: HybridDrafter(
        [PromptLookupDrafter(8, host_decides=False)],
        [HeadsDrafter(model.heads, model.base, 16, host_decides=False)],
        16,
    ),
    "sampled": lambda model: SampledHeadsDrafter(model.heads, model.base, 16, 0.9),
}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def models(request, base_directory):
    """The same base and heads, with graphs and without.

    How attention is split, and with it the rounding, follows from the rows that it is told of. In bfloat16 that may
    decide a near tie, so there the eager steps run over the same fixed buffers.
    """
    model = load(base_directory, request.param)
    same_buffers = StepGraphs(model.base, lambda function: function) if request.param == torch.bfloat16 else False
    return model, MedusaModel(model.base, model.heads, graph=same_buffers)


def contents(outputs):
    return [(output.tokens, output.steps, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_graph_writes_what_eager_steps_write(models, drafter, settings, caplog, monkeypatch):
    graphed, eager = models
    monkeypatch.setattr("medusa.engine.graph.SHORTEST", 32)  # texts outgrow their buckets on the way
    options = {"max_new_tokens": 48, "drafter": DRAFTERS[drafter](graphed)} | SETTINGS[settings]
    with caplog.at_level(logging.INFO, "medusa.engine.graph"):
        for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[::-1]):
            assert contents(graphed.generate(prompts, **options)) == contents(eager.generate(prompts, **options))
    assert not caplog.records, "nothing ran eagerly"


@pytest.mark.parametrize("architecture", REMEMBER)
def test_heads_that_remember_draft_in_graphs(base_directory, architecture, caplog):
    graphed = load(base_directory, torch.float32, architecture=architecture)
    eager = MedusaModel(graphed.base, graphed.heads, graph=False)
    options = {"max_new_tokens": 48, "drafter": DRAFTERS["heads"](graphed)}
    with caplog.at_level(logging.INFO, "medusa.engine.graph"):
        for prompts in (PROMPTS[:1], PROMPTS):
            assert contents(graphed.generate(prompts, **options)) == contents(eager.generate(prompts, **options))
    assert not caplog.records, "nothing ran eagerly"


def test_a_conversation_reuses_its_graph(models):
    graphed, eager = models
    prefix, other, prompt = Prefix(), Prefix(), PROMPTS[0]
    for _ in range(3):
        output = graphed.generate(prompt, prefix=prefix, max_new_tokens=20)
        assert output.tokens == eager.generate(prompt, prefix=other, max_new_tokens=20).tokens
        prompt = [*prompt, *output.tokens, 3]


def test_replays_wait_for_nothing_and_keep_their_memory(models):
    base, drafter = models[0].base, DRAFTERS["hybrid"](models[0])
    graphs, rule = StepGraphs(base), make_rule("sampling", base.device, temperature=0.9)
    sequences, state = prefill(base, [[1, 2, 3], [4, 5]])
    state = dataclasses.replace(state, active=torch.zeros_like(state.active))  # goes on for ever at the same places
    steps = graphs.steps(base, sequences, drafter, rule, state)
    for _ in range(4):
        steps.next()
    torch.cuda.synchronize()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(500):
            assert steps.next() == [[], []]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (used, reserved)


def test_what_is_kept_can_be_freed(models, caplog):
    graphed, used = models[0], []
    with caplog.at_level(logging.INFO, "medusa.engine.graph"):
        for _ in range(2):  # what kernels keep for themselves is there after the first time
            graphed.generate(PROMPTS, max_new_tokens=8)
            kept = torch.cuda.memory_allocated()
            graphed.release()
            used.append(torch.cuda.memory_allocated())
            assert used[-1] < kept
    assert used[0] == used[1]
    assert not caplog.records, "nothing ran eagerly"


def test_steps_are_recorded_again_when_the_cache_has_grown(base_directory, caplog, monkeypatch):
    """Then all graphs are dropped at once, and torch would refuse a memory pool without graphs."""
    monkeypatch.setattr("medusa.cache.pool.RESERVED_ON_DEVICE", 64)
    graphed = load(base_directory, torch.float32)
    eager = MedusaModel(graphed.base, graphed.heads, graph=False)
    with caplog.at_level(logging.INFO, "medusa.engine.graph"):
        outputs = [graphed.generate(prompts, max_new_tokens=90) for prompts in (PROMPTS[:1], PROMPTS)]
    assert not caplog.records, "nothing ran eagerly"
    assert [contents(output) for output in outputs] == [
        contents(eager.generate(prompts, max_new_tokens=90)) for prompts in (PROMPTS[:1], PROMPTS)
    ]
