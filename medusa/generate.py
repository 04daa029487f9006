"""The decode loop for a fixed batch: the readable reference of the whole algorithm.

prefill the prompts
while a sequence grows:
    draft a tree, verify it in one pass, accept a path, commit it      (medusa/step.py)
    hand the new tokens to the answers, which decide when they end     (medusa/output.py)
"""

import dataclasses
from collections.abc import Generator, Sequence

import torch

from medusa.acceptance import Rule
from medusa.base_model import BaseModel
from medusa.cache import SlotCache
from medusa.drafters import Drafter
from medusa.output import Answer, Piece
from medusa.step import decode_step, prefill

HEADROOM = 256
"""Rows that a new cache has for an answer; a longer one makes it grow."""


def new_answers(
    base: BaseModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Sequence[str] = (),
    incremental: bool = False,
) -> list[Answer]:
    """Empty answers to a batch of prompts.

    Args:
        base: The frozen base.
        prompts: Token ids, at least one per prompt.
        max_new_tokens: Limit per answer; the base's context length limits it too.
        stop: Strings that end an answer.
        incremental: Make text token by token, for streaming.

    Raises:
        ValueError: An empty prompt, a prompt that fills the context, or a limit below 1.
    """
    limits = [_room(base, len(prompt), max_new_tokens) for prompt in prompts]
    return [
        Answer(base.tokenizer, len(prompt), limit, base.eos_ids, stop, incremental)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]


def decode(
    base: BaseModel,
    drafter: Drafter,
    rule: Rule,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    max_steps: int | None = None,
    cache: SlotCache | None = None,
) -> Generator[list[list[Piece]]]:
    """Grow the answers to a batch of prompts of any lengths until all have ended; yields after every step.

    Args:
        base: The frozen base.
        drafter: Proposes a tree per step.
        rule: Decides which drafted tokens stand.
        prompts: Token ids.
        answers: One empty answer per prompt.
        max_steps: Limit on verify passes.
        cache: Where rows of the prompts may stand already, see ``prefill``; None = a new one.

    Yields:
        For every prompt the pieces of text that the step made final.
    """
    if cache is None:
        longest = max(len(prompt) + answer.max_new_tokens for prompt, answer in zip(prompts, answers, strict=True))
        limit = longest + 2 * drafter.nodes
        cache = base.new_cache(len(prompts), min(limit, max(map(len, prompts)) + HEADROOM), limit)
    state = prefill(base, cache, prompts)
    if base.device.type == "cuda":
        torch.cuda.synchronize(base.device)
    for answer in answers:
        answer.start_clock()

    steps = 0
    while any(answer.active for answer in answers):
        result = decode_step(base, cache, drafter, rule, state)
        steps += 1
        pieces = [
            answer.extend(tokens) if tokens else [] for answer, tokens in zip(answers, result.tokens, strict=True)
        ]
        if steps == max_steps:
            for answer, new in zip(answers, pieces, strict=True):
                new += answer.end("length") if answer.active else []
        state = result.state
        if any(tokens and not answer.active for answer, tokens in zip(answers, result.tokens, strict=True)):
            active_B = torch.tensor([answer.active for answer in answers], device=base.device)
            state = dataclasses.replace(state, active=active_B)
        yield pieces


def _room(base: BaseModel, prompt_tokens: int, max_new_tokens: int) -> int:
    """Tokens that may follow a prompt."""
    if prompt_tokens < 1:
        raise ValueError("prompt (0 tokens) is empty; give at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens ({max_new_tokens}) must be at least 1; raise it")
    if prompt_tokens >= base.context_length:
        raise ValueError(
            f"prompt ({prompt_tokens} tokens) leaves no room in the base's context ({base.context_length} tokens);"
            " shorten the prompt"
        )
    return min(max_new_tokens, base.context_length - prompt_tokens)
