"""Words of regeneration: what the base is asked, what it answers, and who answers in its name.

This module needs the standard library only, so that ``--help`` answers at once.
"""

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

BATCH = 64
"""Conversations that are decoded together in this process."""

Message = dict[str, str]
"""{"role", "content"} of one turn."""


@dataclass(frozen=True)
class Settings:
    """How the base answers, whoever runs it: all that decides which tokens come out."""

    max_new_tokens: int = 128
    """Tokens per answer."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    """Smallest probability that the tokens to draw from have together; 1 = all tokens."""
    seed: int = 0
    """Of sampled answers; each prompt draws with its own, made of this one and its number."""


@dataclass(frozen=True)
class EndpointSettings:
    """How a server is asked."""

    concurrency: int = 32
    """Requests under way at a time."""
    retries: int = 6
    """More tries of a request that met a busy, broken or silent server."""
    timeout: float = 600.0
    """Seconds until a request without an answer is given up."""


@dataclass(frozen=True)
class Prompt:
    """One conversation without its answers, or plain text to continue."""

    asked: tuple[tuple[Message, ...], ...] = ()
    """The messages before each answer, since the answer before; empty for plain text."""
    ids: tuple[int, ...] = ()
    """Token ids before the first answer; empty where only a server needs to know them."""
    place: str = field(default="", compare=False)
    """Where it stands, as warnings name it."""


class Exchange(NamedTuple):
    """One answer, in the base's tokens."""

    prompt: list[int]
    """All that the base read, earlier turns included."""
    answer: list[int]
    """What it wrote; an end-of-turn token is the last only where it wrote one."""


class UnansweredError(ValueError):
    """Why one prompt has no answer; others may have one."""


Answered = list[Exchange] | UnansweredError


class Answerer(Protocol):
    """Answers every turn of conversations with the base's own words."""

    def answer(self, prompts: Sequence[tuple[int, Prompt]]) -> Generator[tuple[int, Answered]]:
        """Answer numbered prompts.

        Args:
            prompts: Number and prompt; a prompt's answer depends on both, and not on the prompts beside it.

        Yields:
            A prompt's number with its exchanges (one per turn, as far as the base's context reaches) or with the
            reason why there are none; in any order, each as soon as it is complete.

        Raises:
            ValueError: No prompt will be answered.
        """
        ...


def named(prompt: Prompt, reason: object) -> str:
    """Why something is wrong with a prompt, and where it stands."""
    return f"{prompt.place}: {reason}" if prompt.place else str(reason)


def warn_of_ends(reasons: Sequence[str]) -> None:
    """Say, once, how many conversations ended before a later turn, and why the first one did."""
    if reasons:
        logger.warning("%d conversations end before a turn that has no answer; the first: %s", len(reasons), reasons[0])


def samples(exchanges: Sequence[Exchange]) -> list[dict[str, list[int]]]:
    """Training samples of one conversation, only the base's own answers supervised.

    Exchanges join into one sample as long as each prompt begins with all that was said before. Where a template
    writes earlier turns anew (without their reasoning, say), or their text has other tokens than the base wrote, a new
    sample begins: each answer then stands behind exactly what the base read.

    Returns:
        {"input_ids", "loss_mask"} each.
    """
    found: list[dict[str, list[int]]] = []
    for prompt, answer in exchanges:
        said = found[-1]["input_ids"] if found else []
        if not found or prompt[: len(said)] != said:
            found.append({"input_ids": [], "loss_mask": []})
        ids, mask = found[-1]["input_ids"], found[-1]["loss_mask"]
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
        ids += prompt[len(ids) :] + answer
    return found
