"""Methods of decoding with the same weights: this engine's drafters and rules, and transformers' ``generate``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from medusa import BaseModel, MedusaModel, SamplingParams, Speculation
from medusa.base import gguf, smollm2
from medusa.base.adapter import apply_adapter
from medusa.sampling import RULES

PLAIN, AUTO = "plain", "auto"
LOSSY = "typical"
"""The acceptance rule whose text is not the base's own."""
LOOKUP_TOKENS = 10
"""Drafted tokens of transformers' prompt lookup, from its documentation."""


class Answers(NamedTuple):
    """The answers to a batch of prompts."""

    tokens: list[list[int]]
    """New token ids; an end-of-sequence token can only be the last one."""
    passes: list[int] | None = None
    """Number of passes of the base for each answer; None = not reported."""


class Method(NamedTuple):
    """A method of decoding."""

    name: str
    complete: Callable[[Sequence[list[int]], Sequence[int]], Answers]
    """Completes a batch of prompts, with a seed for each."""
    ours: bool = False
    """Whether it is this engine, in which equal seeds give equal text."""
    batches: bool = True
    """Whether it supports several prompts at once."""


def speculation(name: str) -> Speculation:
    """Parse a method's name: "plain", "auto" or a drafter, optionally with a rule after a colon ("auto:typical").

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
    """This engine, with the drafter of this name, or with the ``wanted`` options.

    Raises:
        ValueError: The model does not support it.
    """
    wanted = wanted or speculation(name)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens)
    model.batch().check([0], sampling, wanted)

    def complete(prompts: Sequence[list[int]], seeds: Sequence[int]) -> Answers:
        own = [replace(sampling, seed=seed) for seed in seeds]
        outputs = model.generate(list(prompts), sampling=own, speculation=wanted)
        return Answers([output.tokens for output in outputs], [output.steps for output in outputs])

    return Method(name, complete, ours=True)


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


def of_transformers(
    copy: PreTrainedModel,
    eos: frozenset[int],
    new_tokens: int,
    temperature: float,
    draft_model: PreTrainedModel | None = None,
    exit_layer: int = 0,
) -> list[Method]:
    """transformers' ``generate`` on a copy of the weights, with all its methods.

    Args:
        copy: The weights in plain layers.
        eos: Tokens that end an answer.
        new_tokens: Most new tokens per answer.
        temperature: 0 = greedy.
        draft_model: The assistant model for assisted generation; None = without.
        exit_layer: Number of first layers for early-exit drafts; 0 = without.
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
    """The tokens up to and including the first end-of-sequence token; the rest is padding of the batch."""
    last = next((place for place, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return list(tokens[: last + 1])
