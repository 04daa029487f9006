"""Decodes the same prompts with several engines alternately, and compares speed and text.

Every engine holds the same weights in the same dtype on the same threads. Times are wall-clock times of whole calls,
prefill included; a speed is the median over rounds of all tokens of a round / all seconds of a round. Ratios are
medians of the ratios within each round, because a machine that is slow for a while is slow for both sides.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from medusa import BaseModel, MedusaModel
from medusa.base import gguf, smollm2
from medusa.base.adapter import apply_adapter
from medusa.serve.demo.progress import Progress

Engine = Callable[[list[int]], tuple[list[int], int]]
"""Token ids of a prompt -> new token ids, and the number of passes of the base."""


class Call(NamedTuple):
    """One answer of one engine."""

    tokens: list[int]
    """New token ids."""
    steps: int
    """Passes of the base."""
    seconds: float
    """Wall-clock time."""


@dataclass
class Timing:
    """The measurements of one engine."""

    rounds: list[list[Call]] = field(default_factory=list)
    """For each round the calls, one per prompt, in order."""

    def of(self, prompts: Collection[int]) -> "Timing":
        """The measurements of some prompts, by index."""
        return Timing([[calls[index] for index in prompts] for calls in self.rounds])

    @property
    def rates(self) -> list[float]:
        """Tokens per second, one value per round."""
        return [sum(len(c.tokens) for c in calls) / sum(c.seconds for c in calls) for calls in self.rounds]

    @property
    def outputs(self) -> list[list[int]]:
        """New token ids per prompt in the last round."""
        return [call.tokens for call in self.rounds[-1]]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, median over the rounds."""
        return median(self.rates)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per pass of the base in the last round."""
        return sum(map(len, self.outputs)) / sum(call.steps for call in self.rounds[-1])

    def speedup_over(self, baseline: "Timing") -> float:
        """Ratio of both speeds in the same round, median over the rounds."""
        return median(ours / theirs for ours, theirs in zip(self.rates, baseline.rates, strict=True))


def unpacked_copy(base: BaseModel) -> PreTrainedModel:
    """A second copy of a base's weights in transformers' own layers with its own attention.

    ``generate`` then chooses tokens by its arguments alone, and not by settings that come with the checkpoint.
    """
    path = gguf.expanded(smollm2.locate(base.name))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=base.dtype)
    if base.adapter:
        model = apply_adapter(model, base.adapter)
    model.generation_config = GenerationConfig(eos_token_id=sorted(base.eos_ids) or None, pad_token_id=0)
    return model.to(base.device).eval()


def transformers_engine(model: PreTrainedModel, max_new_tokens: int) -> Engine:
    """transformers' own ``generate``, greedy, with default options; one step per token is counted."""

    def run(prompt: list[int]) -> tuple[list[int], int]:
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
        new: list[int] = out[0, len(prompt) :].tolist()
        return new, len(new)

    return run


def medusa_engine(model: MedusaModel, max_new_tokens: int, **options: Any) -> Engine:
    """Our ``generate`` with these options, greedy by default; ``nodes=1`` is plain decoding.

    All engines use the same seed, so that sampled texts can be compared.
    """
    options = {"seed": 0, **options}

    def run(prompt: list[int]) -> tuple[list[int], int]:
        output = model.generate(prompt, max_new_tokens=max_new_tokens, **options)
        return output.tokens, output.steps

    return run


def compare(engines: dict[str, Engine], prompts: Sequence[list[int]], rounds: int) -> dict[str, Timing]:
    """Run all engines over all prompts, ``rounds`` times; each round starts with another engine. Progress is on stderr.

    Args:
        engines: Engines by name.
        prompts: Token ids of the prompts.
        rounds: Number of measured repetitions, after one warm-up call of each engine.
    """
    names = list(engines)
    timings = {name: Timing() for name in names}
    with Progress(len(names) * (1 + rounds * len(prompts))) as progress:
        for name in names:
            progress.stage(f"warm-up: {name}")
            engines[name](prompts[0])
            progress.update()
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                progress.stage(f"round {number + 1} of {rounds}: {name}")
                calls: list[Call] = []
                for prompt in prompts:
                    begin = time.perf_counter()
                    tokens, steps = engines[name](prompt)
                    calls.append(Call(tokens, steps, time.perf_counter() - begin))
                    progress.update()
                timings[name].rounds.append(calls)
    return timings


def identical(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    """Number of outputs that are equal in all tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def repeated_share(outputs: Sequence[list[int]]) -> float:
    """Share of 4-grams that occurred earlier in the same answer, since small models repeat themselves."""
    seen = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        total += len(grams)
        seen += len(grams) - len(set(grams))
    return seen / max(total, 1)
