"""Decode the same prompts with several engines, alternated, and compare speed and text.

Every engine holds the same weights in the same dtype on the same threads. Times are wall-clock times of whole calls,
prefill included; a speed is the median over rounds of all tokens of a round / all seconds of a round. Ratios are
medians of the ratios within each round: a machine that is slow for a while is slow for both sides.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from transformers import PreTrainedModel

from medusa import MedusaModel

Engine = Callable[[list[int]], tuple[list[int], int]]
"""Prompt ids to new token ids, and the passes of the base that they took."""


@dataclass
class Timing:
    """What one engine did.

    Attributes:
        rates: Tokens per second, one value per round.
        outputs: New token ids per prompt, of the last round.
        steps: Passes of the base per prompt, of the last round.
    """

    rates: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Median over the rounds."""
        return median(self.rates)

    def speedup_over(self, baseline: "Timing") -> float:
        """Median over the rounds of the ratio of both speeds in the same round."""
        return median(ours / theirs for ours, theirs in zip(self.rates, baseline.rates, strict=True))

    def tokens_per_step(self, start: int = 0, every: int = 1) -> float:
        """Tokens per pass over whole outputs, of every prompt or of each ``every``-th one from ``start`` on."""
        return sum(map(len, self.outputs[start::every])) / sum(self.steps[start::every])


def transformers_engine(model: PreTrainedModel, max_new_tokens: int) -> Engine:
    """transformers' own ``generate``, greedy, as anyone would call it."""

    def run(prompt: list[int]) -> tuple[list[int], int]:
        ids = torch.tensor([prompt], device=model.device)
        new: list[int] = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )[0, len(prompt) :].tolist()
        return new, len(new)

    return run


def medusa_engine(
    model: MedusaModel, max_new_tokens: int, nodes: int | None = None, drafter: str | None = None
) -> Engine:
    """Our decoding, greedy; ``nodes=1`` is plain decoding."""

    def run(prompt: list[int]) -> tuple[list[int], int]:
        output = model.generate(prompt, max_new_tokens=max_new_tokens, nodes=nodes, drafter=drafter)
        return output.tokens, output.steps

    return run


def compare(
    engines: dict[str, Engine],
    prompts: Sequence[list[int]],
    rounds: int,
    progress: Callable[[range], Iterable[int]] = iter,
) -> dict[str, Timing]:
    """Run all engines over all prompts, ``rounds`` times; every round begins with another engine.

    Args:
        engines: By name.
        prompts: Token ids.
        rounds: Repetitions that are measured, after one short warm-up.
        progress: Wraps the rounds, for a progress bar.
    """
    names = list(engines)
    timings = {name: Timing() for name in names}
    for name in names:
        engines[name](prompts[0])
    for number in progress(range(rounds)):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            begin = time.perf_counter()
            results = [engines[name](prompt) for prompt in prompts]
            seconds = time.perf_counter() - begin
            timing = timings[name]
            timing.outputs, timing.steps = [tokens for tokens, _ in results], [steps for _, steps in results]
            timing.rates.append(sum(map(len, timing.outputs)) / seconds)
    return timings


def identical(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    """How many outputs are token for token the same."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def repeated_share(outputs: Sequence[list[int]], length: int = 4) -> float:
    """Share of ``length``-grams that occurred before in the same answer: small models repeat themselves."""
    seen = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
        total += len(grams)
        seen += len(grams) - len(set(grams))
    return seen / max(total, 1)
