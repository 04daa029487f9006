"""Ways to decode the same weights: this engine's drafters and rules, and transformers' own ``generate``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from medusa import MedusaModel, SamplingParams, Speculation
from medusa.sampling import RULES

PLAIN, AUTO = "plain", "auto"
LOSSY = "typical"
"""The rule under which text is not the base's own."""
LOOKUP_TOKENS = 10
"""Guesses of transformers' prompt lookup, as its documents have them."""


class Answers(NamedTuple):
    """What a batch of prompts was answered with."""

    tokens: list[list[int]]
    """New token ids; an end-of-sequence token is the last of them."""
    passes: list[int] | None = None
    """Passes of the base that each answer took, where it is told."""


class Method(NamedTuple):
    """A way of decoding."""

    name: str
    complete: Callable[[Sequence[list[int]], Sequence[int]], Answers]
    """Prompts that share a batch, and a seed for each."""
    ours: bool = False
    """This engine: the same seed gives the same text."""
    batches: bool = True
    """It takes several prompts at once."""


def speculation(name: str) -> Speculation:
    """What a name asks for: "plain", "auto", or a drafter, behind a colon perhaps a rule ("auto:typical").

    Raises:
        ValueError: There is no such drafter or rule.
    """
    drafter, _, rule = name.partition(":")
    if rule and rule not in RULES:
        raise ValueError(f"method ({name}) names no rule; choose one of: {', '.join(RULES)}")
    if "ngram" in drafter.split("+"):
        raise ValueError(f"method ({name}) would remember its answers of the previous round; leave it out")
    named = None if drafter in (PLAIN, AUTO) else drafter
    return Speculation(drafter=named, acceptance=rule or None, nodes=1 if drafter == PLAIN else None)


def ours(
    model: MedusaModel, name: str, new_tokens: int, temperature: float, wanted: Speculation | None = None
) -> Method:
    """This engine, drafting as the name says, or as is wanted.

    Raises:
        ValueError: It cannot be had here.
    """
    wanted = wanted or speculation(name)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens)
    model.batch().check([0], sampling, wanted)

    def complete(prompts: Sequence[list[int]], seeds: Sequence[int]) -> Answers:
        own = [replace(sampling, seed=seed) for seed in seeds]
        outputs = model.generate(list(prompts), sampling=own, speculation=wanted)
        return Answers([output.tokens for output in outputs], [output.steps for output in outputs])

    return Method(name, complete, ours=True)


def of_transformers(
    copy: PreTrainedModel,
    eos: frozenset[int],
    new_tokens: int,
    temperature: float,
    draft_model: PreTrainedModel | None = None,
    exit_layer: int = 0,
) -> list[Method]:
    """transformers' ``generate`` on a copy of the weights, in all ways that it has for them.

    Args:
        copy: The weights in plain layers.
        eos: Tokens that end an answer.
        new_tokens: Limit per answer.
        temperature: 0 = greedy.
        draft_model: Assists it.
        exit_layer: It also drafts with so many of its first layers; 0 = it does not.
    """
    ways: dict[str, dict[str, Any]] = {"": {}, " prompt lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    if draft_model is not None:
        ways[" assisted"] = {"assistant_model": draft_model}
    if exit_layer:
        ways[" early exit"] = {"assistant_early_exit": exit_layer}
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def method(name: str, options: dict[str, Any]) -> Method:
        @torch.inference_mode()
        def complete(prompts: Sequence[list[int]], seeds: Sequence[int]) -> Answers:
            torch.manual_seed(seeds[0])
            width = max(map(len, prompts))
            padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
            mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            out = copy.generate(
                torch.tensor(padded, device=copy.device), attention_mask=torch.tensor(mask, device=copy.device),
                max_new_tokens=new_tokens, pad_token_id=0, **how, **options,
            )  # fmt: skip
            return Answers([ended(tokens, eos) for tokens in out[:, width:].tolist()])

        return Method(f"transformers{name}", complete, batches=not options)

    return [method(name, options) for name, options in ways.items()]


def ended(tokens: Sequence[int], eos: frozenset[int]) -> list[int]:
    """Up to the first end-of-sequence token, that one included; the rest fills up a batch."""
    last = next((place for place, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return list(tokens[: last + 1])
