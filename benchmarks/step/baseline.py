"""transformers ``generate`` as the other baseline: the same weights, dtype and threads, plain layers, greedy."""

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.machine import ratio
from benchmarks.step.rig import Rig
from medusa.clock import alternate, synchronize

TOKENS = 16
"""New tokens per sample."""


class TokenClock(BaseStreamer):
    """Notes when ``generate`` hands out the prompt, then each new token."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt, or the newest token of each sequence."""
        synchronize(self._device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def seconds_per_token(self) -> float:
        """Without the prefill, which ends with the first new token."""
        return (self.times[-1] - self.times[1]) / (len(self.times) - 2)


def generate_sample(model: PreTrainedModel, prompts_BT: torch.Tensor) -> float:
    """Seconds per token of one greedy call of ``generate``."""
    clock = TokenClock(prompts_BT.device)
    model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        max_new_tokens=TOKENS + 1,
        min_new_tokens=TOKENS + 1,
        do_sample=False,
        streamer=clock,
    )
    return clock.seconds_per_token


def plain_sample(rig: Rig) -> float:
    """Seconds per token of our plain decoding from the same context."""
    return rig.step_seconds(rig.drafter(1), steps=TOKENS)


def measure_baseline(rig: Rig, model: PreTrainedModel, rounds: int) -> dict[str, Any]:
    """Plain decoding of this engine and of transformers, alternately.

    Args:
        rig: The base at its context, with room for ``TOKENS`` plain steps.
        model: The same weights in plain layers.
        rounds: Measured repetitions.
    """
    prompts_BT = rig.state.history[:, : rig.context].clone()
    samples = {"plain": partial(plain_sample, rig), "transformers": partial(generate_sample, model, prompts_BT)}
    times = alternate(samples, rounds)
    return {
        "batch": rig.batch,
        "context": rig.context,
        "new_tokens": TOKENS,
        "transformers_tokens_per_s": round(rig.batch / median(times["transformers"]), 2),
        "plain_tokens_per_s": round(rig.batch / median(times["plain"]), 2),
        "plain_over_transformers": round(ratio(times["transformers"], times["plain"]), 3),
    }
