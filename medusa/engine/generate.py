"""The decode loop for a fixed batch: the readable reference of the whole algorithm.

prefill the prompts
while a sequence grows:
    draft a tree, verify it in one pass, accept a path, commit it      (medusa/engine/step.py)
    hand the new tokens to the answers, which decide when they end     (medusa/engine/output.py)
"""

from collections.abc import Callable, Generator, Sequence

from medusa.acceptance import Rule
from medusa.base.model import BaseModel
from medusa.cache import SlotCache
from medusa.clock import synchronize
from medusa.drafters import Drafter
from medusa.engine.output import Answer, Piece
from medusa.engine.step import EagerSteps, Steps, prefill
from medusa.state import DecodeState

HEADROOM = 256
"""Rows that a new cache has for an answer; a longer one makes it grow."""

StartSteps = Callable[[BaseModel, SlotCache, Drafter, Rule, DecodeState], Steps]
"""Steps from a state on, in the cache that holds its rows."""


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
    seeds: Sequence[int] | None = None,
    cache: SlotCache | None = None,
    start: StartSteps = EagerSteps,
) -> Generator[list[list[Piece]]]:
    """Grow the answers to a batch of prompts of any lengths until all have ended; yields after every step.

    Args:
        base: The frozen base.
        drafter: Proposes a tree per step.
        rule: Decides which drafted tokens stand.
        prompts: Token ids.
        answers: One empty answer per prompt.
        max_steps: Limit on verify passes.
        seeds: One per prompt, None = 0.
        cache: Where rows of the prompts may stand already, see ``prefill``; None = a new one.
        start: What runs the steps: ``EagerSteps``, or ``StepGraphs.steps``.

    Yields:
        For every prompt the pieces of text that the step made final.
    """
    if cache is None:
        cache = base.new_cache(len(prompts), *cache_rows(prompts, answers, drafter.nodes))
    state = prefill(base, cache, prompts, seeds)
    synchronize(base.device)
    for answer in answers:
        answer.start_clock()

    steps, count = start(base, cache, drafter, rule, state), 0
    while any(answer.active for answer in answers):
        new_tokens = steps.next()
        count += 1
        pieces = [answer.extend(tokens) if tokens else [] for answer, tokens in zip(answers, new_tokens, strict=True)]
        if count == max_steps:
            for answer, new in zip(answers, pieces, strict=True):
                new += answer.end("length") if answer.active else []
        if any(tokens and not answer.active for answer, tokens in zip(answers, new_tokens, strict=True)):
            steps.keep([answer.active for answer in answers])
        yield pieces


def cache_rows(prompts: Sequence[Sequence[int]], answers: Sequence[Answer], nodes: int) -> tuple[int, int]:
    """Rows per slot that a cache for these answers has at the start, and at most.

    The tree of the last step stands behind the longest text. Beside others that still grow, an answer that ends in the
    middle of a step may be longer by a step, and by one more where steps run ahead.
    """
    longest = max(len(prompt) + answer.max_new_tokens for prompt, answer in zip(prompts, answers, strict=True))
    limit = longest + 4 * nodes
    return min(limit, max(map(len, prompts)) + HEADROOM), limit


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
