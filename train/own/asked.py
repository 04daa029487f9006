"""The prompts: the user's, or those that the base writes itself; some of them are held out.

Prompts are sorted by a digest of their text: a random order that does not depend on the order in which they were found
or finished. So a run that was stopped divides them in the same way as one that was not.
"""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from medusa import MedusaModel
from medusa.base.names import is_embedded
from medusa.data.chat_prompts import chat_prompts
from medusa.data.exchange import BATCH, Answered, Answerer, Exchange, Prompt, Settings, UnansweredError
from medusa.data.files import file_records
from medusa.data.local import LocalAnswerer
from medusa.data.own_prompts import OwnPrompts, openings
from medusa.data.prompts import conversations, embedded_prompts
from medusa.data.regenerate import regenerate
from medusa.data.sources import Source
from medusa.train.own.plan import FEWEST, LEAST_HELD_OUT, Plan

logger = logging.getLogger(__name__)

FROM_FILE, CODE, CHAT, TEXT = "the file's", "code to write or continue", "chat prompts", "texts that it goes on with"
"""Kinds of prompts: the user's; for the embedded base; for bases with a chat template; for bases without one."""
WRITTEN = "written.jsonl"
"""Prompts that the base wrote."""
CHAT_SETTINGS, TEXT_SETTINGS = Settings(256, 1.0, 0.9), Settings(32, 1.0, 0.95)
"""Sampling of a prompt, and of the beginning of a text, that the base writes."""
OWN_SHARE = 0.5
"""Share of chat prompts that the base writes; the others are made from templates."""
FIRST_WORDS = 8
"""Most words that a text is begun with, unless it begins with nothing."""


def read_prompts(path: str) -> list[Prompt]:
    """The different conversations of a file, without their answers.

    Raises:
        OSError: there is no such file.
        ValueError: a record is not a conversation, or there are too few.
    """
    found = _unique(conversations(Source(path)), lambda prompt: json.dumps(prompt.asked))
    least = FEWEST + LEAST_HELD_OUT
    if len(found) < least:
        raise ValueError(
            f"prompts ({path}) hold {len(found)} different ones, and at least {least} are needed, "
            f"{LEAST_HELD_OUT} of which are held out; add some, or leave --prompts out: the base then writes them"
        )
    return found


def kind_of(model: MedusaModel, path: str) -> str:
    """The kind of prompts for a base and a file ("" = none)."""
    if path:
        return FROM_FILE
    if is_embedded(model.base.name):
        return CODE
    return CHAT if model.base.tokenizer.chat_template else TEXT


def some(model: MedusaModel, kind: str, found: Sequence[Prompt]) -> list[Prompt]:
    """Some prompts of the kind that will be answered, for the measurement, as many as a batch holds."""
    if found:
        return [_encoded(model, prompt) for prompt in found[:BATCH]]
    if kind == CODE:
        return [Prompt(ids=tuple(ids)) for ids in embedded_prompts(model, "train", BATCH)]
    made = chat_prompts("train", BATCH)
    if kind == CHAT:
        return [Prompt(prompt.asked) for prompt in made]
    texts = [list(model.base.tokenizer(prompt.turns[0]).input_ids) for prompt in made]
    return [Prompt(ids=tuple(ids[: TEXT_SETTINGS.max_new_tokens])) for ids in texts]  # as long as the later ones


def beginnings(model: MedusaModel, kind: str, count: int) -> list[Prompt]:
    """Openings from which the base writes prompts; empty if its chat template shows no place for them."""
    if kind == TEXT:
        return text_openings(model, count)
    try:
        return openings(model, count) if kind == CHAT else []
    except ValueError:
        return []


def text_openings(model: MedusaModel, count: int) -> list[Prompt]:
    """Beginnings of texts; half of them are only the token that begins texts, if there is one."""
    tokenizer, rng = model.base.tokenizer, random.Random(0)
    bare, found = list(tokenizer("").input_ids), []
    for prompt in chat_prompts("train", count):
        words = prompt.turns[0].split()[: rng.randint(1, FIRST_WORDS)]
        nothing = bool(bare) and rng.random() < OWN_SHARE
        found.append(Prompt(ids=tuple(bare if nothing else tokenizer(" ".join(words)).input_ids)))
    return found


class Watched:
    """An answerer that reports how many prompts are left.

    Args:
        answerer: answers the prompts.
        tell: called with the number of remaining prompts.
    """

    def __init__(self, answerer: Answerer, tell: Callable[[int], object]) -> None:
        self._answerer, self._tell = answerer, tell

    def answer(self, prompts: Sequence[tuple[int, Prompt]]) -> Generator[tuple[int, Answered]]:
        """See `Answerer`."""
        self._tell(len(prompts))
        for done, answered in enumerate(self._answerer.answer(prompts), start=1):
            yield answered
            self._tell(len(prompts) - done)


def write_prompts(plan: Plan, model: MedusaModel, out: Path, tell: Callable[[float, str], None]) -> None:
    """Let the base write the prompts of the plan, if it has any to write; existing ones are kept."""
    path = out / WRITTEN
    if not plan.written or path.exists():
        return
    begun = beginnings(model, plan.kind, plan.written)
    settings = CHAT_SETTINGS if plan.kind == CHAT else TEXT_SETTINGS
    local = LocalAnswerer(model, settings)
    own = OwnPrompts(model, local) if plan.kind == CHAT else None
    watched = Watched(own or local, lambda left: tell(1 - left / len(begun), f"{len(begun) - left:,} written"))
    made_by = {"base": model.base.name, **vars(settings)}
    record = own.record if own else partial(_text, model.base.eos_ids)
    try:
        regenerate(begun, watched, path, made_by, record, shown=False, distinct=True)
    except UnansweredError as error:
        logger.warning("%s; only prompts that are made from templates are used", error)
        path.touch()


def division(plan: Plan, model: MedusaModel, out: Path, found: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of the training data, and the held-out prompts.

    Args:
        plan: the plan.
        model: the base.
        out: the directory of the run.
        found: the user's prompts.
    """
    count, heldout = plan.conversations, plan.heldout
    if plan.kind == CODE:
        sides = embedded_prompts(model, "train", count), embedded_prompts(model, "heldout", heldout)
        train, other = ([Prompt(ids=tuple(ids)) for ids in side] for side in sides)
        return train, other
    if plan.kind == CHAT:
        own = _written(out)
        templates = chat_prompts("train", count + len(own)) + chat_prompts("heldout", heldout)
        known = {prompt.turns[0] for prompt in templates}  # it may have ended one of these at once
        own = [prompt for prompt in own if prompt.asked[0][0]["content"] not in known]
        kept = min(heldout // 2, len(own) // 2)
        made = chat_prompts("train", count - len(own) + kept), chat_prompts("heldout", heldout - kept)
        train, other = ([Prompt(prompt.asked) for prompt in side] for side in made)
        train, other = (own[kept:] + train)[:count], own[:kept] + other
    else:
        whole = list(found) or _written(out)
        train, other = whole[heldout : heldout + count], whole[:heldout]
    return [_encoded(model, prompt) for prompt in train], [_encoded(model, prompt) for prompt in other]


def _encoded(model: MedusaModel, prompt: Prompt) -> Prompt:
    """The prompt as plain text if the base has no chat template."""
    tokenizer = model.base.tokenizer
    if prompt.ids or tokenizer.chat_template:
        return prompt
    text = "\n\n".join(message["content"] for message in prompt.asked[0])
    return replace(prompt, asked=(), ids=tuple(tokenizer(text).input_ids))


def _written(out: Path) -> list[Prompt]:
    """The different prompts that the base wrote."""
    path = out / WRITTEN
    if not path.exists() or not path.stat().st_size:
        return []
    records = [record for _, record in file_records(path)]
    chats = (Prompt(((message,),)) for record in records for message in record.get("messages", ()))
    texts = (Prompt(ids=tuple(record["input_ids"])) for record in records if "input_ids" in record)
    return _unique([*chats, *texts], lambda prompt: json.dumps([prompt.asked, prompt.ids]))


def _text(ends: Container[int], exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """A record of the beginning of a text, without end-of-sequence tokens."""
    prompt, answer = exchanges[0]
    return [{"input_ids": [*prompt, *(token for token in answer if token not in ends)]}]


def _unique(prompts: Iterable[Prompt], text: Callable[[Prompt], str]) -> list[Prompt]:
    """The different prompts, sorted by digest."""
    by_digest = {hashlib.sha256(text(prompt).encode()).digest(): prompt for prompt in prompts}
    return [by_digest[digest] for digest in sorted(by_digest)]
