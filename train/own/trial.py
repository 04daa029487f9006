"""Measures the speed of answering and of training on a few rows of the base's own answers.

Shapes: M positions, K heads, F width of the base's hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from medusa import MedusaModel, Request, SamplingParams, Speculation
from medusa.clock import seconds
from medusa.data.exchange import BATCH, Prompt, Settings
from medusa.data.local import sampling_params
from medusa.data.packing import pack
from medusa.data.sources import Sample
from medusa.loading.self_test import choose_decoding
from medusa.loading.separation import choose_separation
from medusa.train.base import load_base
from medusa.train.config import CacheRecipe, Recipe
from medusa.train.features import BasePass, for_rows
from medusa.train.fresh_heads import feature_layers, fresh_heads
from medusa.train.medusa1 import Medusa1
from medusa.train.schedule import head_weights
from medusa.train.workers import Value, Workers

SINGLE_TOKENS = 16
"""Tokens of the completion that is timed alone."""
ROWS, PASS_SECONDS = 16, 15.0
"""Most training rows of the trial, and most seconds of the base's pass over them."""


class Single(NamedTuple):
    """Times of one prompt, decoded plainly."""

    prompt_token: float
    """Seconds per token of the prompt."""
    token: float
    """Seconds per new token."""


@dataclass(frozen=True)
class Answering:
    """Times of many prompts at once."""

    prompt_token: float
    """Seconds per token of a prompt."""
    token: float
    """Seconds per new token, counted over all prompts."""
    together: int
    """Number of prompts that were decoded together."""
    length: float
    """Average tokens of an answer."""
    ends: float
    """Share of answers that end before the limit."""
    texts: Sequence[tuple[Sequence[int], Sequence[int]]]
    """Token ids of prompts and of their answers so far."""

    @property
    def prompt_tokens(self) -> float:
        """Average tokens of a prompt."""
        return fmean(len(prompt) for prompt, _ in self.texts)

    @property
    def longest_prompt(self) -> int:
        """95th percentile of the prompts' tokens."""
        return sorted(len(prompt) for prompt, _ in self.texts)[len(self.texts) * 19 // 20]

    @property
    def seconds(self) -> float:
        """Seconds of one answer."""
        return self.prompt_tokens * self.prompt_token + self.length * self.token


class Training(NamedTuple):
    """Times of training, in one process."""

    row_token: float
    """Seconds per token of a row, in the base's pass."""
    position: float
    """Seconds per trained position, in the heads' forward and backward pass and the optimizer's step."""


def single(model: MedusaModel, prompt: Prompt) -> Single:
    """Time one prompt alone, after a warm-up."""
    device, speculation = model.base.device, Speculation(nodes=1)

    def run(tokens: int) -> float:
        options = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        return seconds(lambda: model.generate(list(prompt.ids), sampling=options, speculation=speculation), device)

    run(2)
    first, whole = run(1), run(1 + SINGLE_TOKENS)
    return Single(first / len(prompt.ids), max(whole - first, 1e-6) / SINGLE_TOKENS)


def answering(model: MedusaModel, prompts: Sequence[Prompt], settings: Sequence[Settings], most: float) -> Answering:
    """Time prompts that are answered together, for some seconds or until half of them have ended.

    The average length includes answers that have not ended: if a share h of all tokens ended an answer, an answer of at
    most n tokens has (1 - (1 - h)^n) / h tokens on average, as if every token ended it with probability h.

    Args:
        model: the base.
        prompts: with token ids.
        settings: sampling settings, used in turn.
        most: seconds for the tokens after the first ones.
    """
    batch, limit = model.batch(), settings[0].max_new_tokens
    requests = [
        batch.add(list(prompt.ids), sampling_params(settings[number % len(settings)], number), Speculation(nodes=1))
        for number, prompt in enumerate(prompts[:BATCH])
    ]

    def prefill() -> None:
        while any(request.active and not request.output.tokens for request in requests):
            batch.step()

    def decode() -> None:
        left = most
        while left > 0 and 2 * len(batch) >= len(requests) and len(batch):
            left -= seconds(batch.step, model.base.device)

    reading = seconds(prefill, model.base.device)
    before = _written(requests)
    writing = seconds(decode, model.base.device)
    for request in filter(lambda request: request.active, requests):
        batch.remove(request)
    written, ended = _written(requests), sum(request.output.finish_reason == "eos" for request in requests)
    hazard = ended / written
    return Answering(
        prompt_token=reading / sum(len(request.prompt) for request in requests),
        token=writing / max(1, written - before),
        together=len(requests),
        length=(1 - (1 - hazard) ** limit) / hazard if hazard else float(limit),
        ends=1 - (1 - hazard) ** limit,
        texts=[(request.prompt, request.output.tokens) for request in requests],
    )


def training(recipe: Recipe, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Training:
    """Load the base as training does, and time its pass over a few rows of texts, and steps of fresh heads on them.

    Args:
        recipe: the base, the heads and their steps.
        texts: prompts and answers.
    """
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers, optim = _Alone(0, 1, here), recipe.optim
    base = choose_decoding(load_base(recipe.base, workers))
    base, device = base.tapped(feature_layers(recipe.heads, base.num_layers)), base.device
    packed = pack([_sample(*text) for text in texts if text[1]], recipe.data.row_tokens)
    base = choose_separation(base, packed.input_ids[0].long())
    # As in `Medusa1`.
    one = seconds(partial(BasePass(for_rows(base), packed, recipe.heads.num_heads, 1).read, torch.tensor([0])), device)
    packed = packed.take(torch.arange(max(1, min(len(packed), ROWS, int(PASS_SECONDS / one)))))

    steps = max(1, len(packed) // optim.rows_per_step)
    kept = replace(recipe, cache=CacheRecipe(), optim=replace(optim, mix_steps=steps))  # one block, kept in memory
    method = Medusa1(kept, base, fresh_heads(recipe, base, packed, workers), packed, workers, steps)
    module = method.module.to(device)
    reading = seconds(lambda: next(method.micro_batches(0, torch.ones(recipe.heads.num_heads))), device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)

    def step(number: int) -> None:
        weights_K = head_weights(optim, method.label_counts(number)[1:]).to(device)
        for batch, _ in method.micro_batches(number, weights_K):
            with torch.autocast(device.type, torch.bfloat16, enabled=base.dtype == torch.bfloat16):
                loss, *_ = module(*batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)  # the first step is slower
    learning = sum(seconds(partial(step, number), device) for number in range(steps))
    positions = sum(int(method.label_counts(number)[0]) for number in range(steps))
    return Training(reading / (steps * optim.rows_per_step * recipe.data.row_tokens), learning / max(1, positions))


class _Alone(Workers):
    """Workers of a single process without torch.distributed."""

    def from_first(self, make: Callable[[], Value]) -> Value:
        """The result of `make`."""
        return make()

    def total(self, values: Tensor) -> Tensor:
        """The values."""
        return values


def _written(requests: Sequence[Request]) -> int:
    return sum(len(request.output.tokens) for request in requests)


def _sample(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    ids = torch.tensor([*prompt, *answer], dtype=torch.int32)
    return Sample(ids, torch.arange(len(ids)) >= len(prompt))
