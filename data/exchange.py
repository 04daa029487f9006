"""Types of regeneration: prompts, answers, and the answerer that generates them.

This module needs only the standard library, so that ``--help`` is fast.
"""

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

BATCH = 64
"""Number of conversations that are decoded together in this process."""

Message = dict[str, str]
"""{"role", "content"} of one turn."""


@dataclass(frozen=True)
class Settings:
    """How the base answers, here or behind a server: all settings that affect the tokens."""

    max_new_tokens: int = 128
    """Most tokens per answer."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    """Probability mass of the tokens to sample from; 1 = all tokens."""
    seed: int = 0
    """Seed of sampled answers; each prompt has its own seed, computed from this one and its number."""


@dataclass(frozen=True)
class EndpointSettings:
    """How requests are sent to a server."""

    concurrency: int = 32
    """Number of concurrent requests."""
    retries: int = 6
    """Number of retries if the server is busy, fails or does not answer."""
    timeout: float = 600.0
    """Seconds until a request without an answer is cancelled."""


@dataclass(frozen=True)
class Prompt:
    """One conversation without its answers, or plain text to continue."""

    asked: tuple[tuple[Message, ...], ...] = ()
    """The messages before each answer, from the previous answer on; empty for plain text."""
    ids: tuple[int, ...] = ()
    """Token ids before the first answer; empty if only a server needs them."""
    place: str = field(default="", compare=False)
    """Its place in the source, for warnings."""


class Exchange(NamedTuple):
    """One prompt with its answer, in the base's tokens."""

    prompt: list[int]
    """All tokens that the base read, including earlier turns."""
    answer: list[int]
    """Tokens that it wrote; the last is an end-of-turn token only if the base wrote one."""


class UnansweredError(ValueError):
    """One prompt cannot be answered; others may be."""


Answered = list[Exchange] | UnansweredError


class Answerer(Protocol):
    """Answers every turn of conversations with text of the base."""

    def answer(self, prompts: Sequence[tuple[int, Prompt]]) -> Generator[tuple[int, Answered]]:
        """Answer numbered prompts.

        Args:
            prompts: Number and prompt; an answer depends only on these two, and not on other prompts.

        Yields:
            A prompt's number, with its exchanges (one per turn, as far as the base's context allows) or with the
            reason why there are none; in any order, each as soon as it is complete.

        Raises:
            ValueError: No prompt can be answered.
        """
        ...


def named(prompt: Prompt, reason: object) -> str:
    """A reason with the place of the prompt."""
    return f"{prompt.place}: {reason}" if prompt.place else str(reason)


def warn_of_ends(reasons: Sequence[str]) -> None:
    """Log once how many conversations ended before a later turn, and why the first one did."""
    if reasons:
        logger.warning("%d conversations end before a turn that has no answer; the first: %s", len(reasons), reasons[0])


def samples(exchanges: Sequence[Exchange]) -> list[dict[str, list[int]]]:
    """Training samples of one conversation, in which only the base's own answers are supervised.

    Exchanges are joined into one sample as long as each prompt begins with the whole earlier conversation. If a
    template changes earlier turns (for example removes their reasoning), or their text has other tokens than the base
    wrote, a new sample begins, so that each answer follows exactly the tokens that the base read.

    Returns:
        Samples {"input_ids", "loss_mask"}.
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
