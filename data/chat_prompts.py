"""Chat prompts of many kinds, made from word lists and templates, for training heads of a real chat model.

Every prompt is a template with ``{slots}`` that are filled from lists, with numbers, or with short invented texts. The
lists are in ``data/chat``. Words that name a subject are divided into a training and a held-out side, so that no
held-out prompt has the subject of a training prompt.
"""

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from medusa.data.exchange import Message
from medusa.data.stdlib import Split

LISTS = Path(__file__).parent / "chat"
SUBJECTS = frozenset(
    "topic list code request story advice country invention foreign english clumsy event object pair choice why".split()
)
"""Lists that are divided: every ``HELDOUT_EVERY``-th word is held out. Other lists only fill in details."""
HELDOUT_EVERY = 8
NUMBERS = {
    "n": (11, 60),
    "m": (5, 40),
    "k": (2, 10),
    "h": (61, 480),
    "year": (1790, 2015),
    "hour": (6, 20),
    "big": (1200, 98000),
}
SECOND_TURN = 0.25
"""Share of conversations in which the answer is followed by a second question."""
SLOT = re.compile(r"\{([a-z]+)\d?\}")


class ChatPrompt(NamedTuple):
    """One conversation without its answers."""

    kind: str
    """The kind of its template, for example "maths"."""
    turns: tuple[str, ...]
    """The user's turns."""

    @property
    def asked(self) -> tuple[tuple[Message, ...], ...]:
        """The messages before each answer."""
        return tuple(({"role": "user", "content": turn},) for turn in self.turns)


def chat_prompts(split: Split, count: int, seed: int = 0) -> list[ChatPrompt]:
    """``count`` different conversations, with alternating kinds; a pure function of its arguments.

    A shorter list is the beginning of a longer one. Held-out prompts have one turn.
    """
    return list(islice(_all(split, seed), count))


def _all(split: Split, seed: int) -> Iterator[ChatPrompt]:
    rng, seen = random.Random(f"{split} {seed}"), set()
    templates, turns = _read("templates"), _read("turns")
    while True:
        for kind, choices in templates.items():
            text = _fill(rng.choice(choices), split, rng)
            second = split == "train" and rng.random() < SECOND_TURN
            if text not in seen:
                seen.add(text)
                yield ChatPrompt(kind, (text, rng.choice(turns)) if second else (text,))


def _fill(template: str, split: Split, rng: random.Random) -> str:
    """Fill all slots of a template, and the slots in the inserted texts.

    A slot that appears twice gets the same words twice; a slot with a number, such as ``{name2}``, gets other words.
    """
    filled: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        slot, name = match[0], match[1]
        if slot not in filled:
            if name in NUMBERS:
                filled[slot] = str(rng.randint(*NUMBERS[name]))
            elif name == "passage":
                filled[slot] = _fill(rng.choice(_read("passages")), split, rng)
            else:
                words = _words(split)[name]
                filled[slot] = SLOT.sub(fill, rng.choice([word for word in words if word not in filled.values()]))
        return filled[slot]

    return SLOT.sub(fill, template)


@cache
def _words(split: Split) -> dict[str, list[str]]:
    """The word lists of one side of the split."""
    lists: dict[str, list[str]] = _read("words") | {"ask": _read("asks")}
    return {
        name: [
            w for i, w in enumerate(words) if name not in SUBJECTS or (i % HELDOUT_EVERY == 0) == (split == "heldout")
        ]
        for name, words in lists.items()
    }


@cache
def _read(name: str) -> Any:
    return json.loads((LISTS / f"{name}.json").read_text(encoding="utf-8"))
