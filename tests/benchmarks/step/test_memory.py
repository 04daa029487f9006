"""Memory that stays is seen, and decoding keeps none."""

import pytest
import torch

from benchmarks.step.inside import watch_memory
from benchmarks.step.rig import Rig
from benchmarks.step.shapes import random_heads
from medusa.acceptance import greedy
from medusa.drafters import HeadsDrafter, HybridDrafter, PromptLookupDrafter
from medusa.engine.step import decode_step

CPU = torch.device("cpu")


def growing_decode(base, leak=None):
    """A production decode of one ever longer text; ``leak`` is handed every step's result."""
    heads = random_heads(base, "recurrent", 3)
    drafter = HybridDrafter([PromptLookupDrafter(4)], [HeadsDrafter(heads, base, 6)], 9)
    rig = Rig(base, heads, batch=1, context=4, room=8000)
    state = rig.state

    def step():
        nonlocal state
        result = decode_step(base, rig.cache, drafter, greedy, state)
        state = result.state
        if leak is not None:
            leak.append(torch.ones(30_000))

    return step


@pytest.mark.slow
def test_live_tensors_do_not_grow_with_steps_and_a_leak_is_seen(tiny):
    flat, leaking = (watch_memory(growing_decode(tiny, leak), 30, CPU, marks=3) for leak in (None, []))
    assert abs(flat[-1]["tensor_bytes"] - flat[0]["tensor_bytes"]) < 4000
    assert leaking[-1]["tensor_bytes"] - leaking[0]["tensor_bytes"] > 19 * 120_000


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_steps(tiny):
    flat, leaking = (watch_memory(growing_decode(tiny, leak), 2000, CPU, marks=3) for leak in (None, []))
    assert abs(flat[-1]["tensor_bytes"] - flat[0]["tensor_bytes"]) < 4000
    assert flat[-1]["resident_bytes"] - flat[0]["resident_bytes"] < 4 << 20
    assert leaking[-1]["resident_bytes"] - leaking[0]["resident_bytes"] > 64 << 20
