"""Prompts that the base writes itself: it continues the chat template at the beginning of a user turn.

A chat model was trained on turns of users, so its own prompts are of the kinds for which it was made (Magpie, Xu et al.
2024, arXiv:2406.08464). So prompts for a custom model need not be collected.
"""

import random
from collections.abc import Generator, Sequence
from typing import Any

from medusa import MedusaModel
from medusa.data.chat import special_tokens
from medusa.data.chat_prompts import chat_prompts
from medusa.data.exchange import Answered, Answerer, Exchange, Prompt, UnansweredError

SHARE = 0.5
"""Share of prompts that begin with words of ``chat`` prompts; the others have no given words."""
MOST_WORDS = 16
"""Most given words; the base writes the rest."""
LEAST_WORDS = 2
PLACE = "{{words}}"


def openings(model: MedusaModel, count: int, seed: int = 0) -> list[Prompt]:
    """Beginnings for the base to continue: the chat template up to a user's words, and often the first words.

    Args:
        model: The base.
        count: Number of openings; a shorter list is the beginning of a longer one.
        seed: Seed of the words.

    Raises:
        ValueError: The base's tokenizer has no chat template, or the place of a user's words in it cannot be found.
    """
    before, rng = _before(model), random.Random(seed)
    texts = []
    for prompt in chat_prompts("train", count, seed):
        words = prompt.turns[0].split(" ")
        given = rng.randint(1, min(MOST_WORDS, len(words))) if rng.random() < SHARE else 0
        texts.append(before + " ".join(words[:given]) if given else before.rstrip(" "))
    return [Prompt(ids=tuple(ids)) for ids in model.base.tokenizer(texts, add_special_tokens=False).input_ids]


class OwnPrompts:
    """Completes openings through another answerer; refuses prompts that are cut off or very short.

    Args:
        model: The base.
        answerer: The answerer that completes openings.
    """

    def __init__(self, model: MedusaModel, answerer: Answerer) -> None:
        self._base, self._answerer, self._before = model.base, answerer, _before(model).rstrip()
        self._special = special_tokens(model.base.tokenizer)

    def answer(self, prompts: Sequence[tuple[int, Prompt]]) -> Generator[tuple[int, Answered]]:
        """See ``Answerer``; the answers complete the openings."""
        for number, answered in self._answerer.answer(prompts):
            yield number, answered if isinstance(answered, UnansweredError) else self._checked(answered)

    def record(self, exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
        """The record of an unanswered conversation, for ``regenerate``."""
        return [{"messages": [{"role": "user", "content": self._text(exchanges[0])}]}]

    def _checked(self, exchanges: list[Exchange]) -> Answered:
        text = self._text(exchanges[0])
        if exchanges[0].answer[-1] not in self._base.eos_ids:
            return UnansweredError(f"the base did not finish it ({text[:60]!r})")
        if len(text.split()) < LEAST_WORDS or self._special.search(text):
            return UnansweredError(f"it is too short, or not only text ({text[:60]!r})")
        return exchanges

    def _text(self, exchange: Exchange) -> str:
        ids = [*exchange.prompt, *exchange.answer]
        if ids[-1] in self._base.eos_ids:
            ids.pop()
        text: str = self._base.tokenizer.decode(ids)
        return text.removeprefix(self._before).strip()


def _before(model: MedusaModel) -> str:
    """The chat template's text before a user's words."""
    shown: str = model.base.tokenizer.decode(model.chat_prompt([{"role": "user", "content": PLACE}]))
    before, found, _ = shown.partition(PLACE)
    if not found or not before:
        raise ValueError(
            f"chat template of the base ({model.base.name}) does not show where a user speaks; give prompts in a file"
        )
    return before
