"""Prompts for the base: from the standard library, or conversations without their answers."""

import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from medusa import MedusaModel
from medusa.data.chat import NoAnswerError
from medusa.data.exchange import Message, Prompt, named
from medusa.data.shapes import questions
from medusa.data.sources import Source
from medusa.data.stdlib import Split, chat_pairs, completion_prompts

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 160
"""Most tokens of an embedded code prompt; longer ones lose their beginning."""
INSTRUCTIONS = ("system", "developer")
"""Roles whose turns are not questions."""


def embedded_prompts(model: MedusaModel, split: Split, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of ``count`` prompts from the standard library, half code to continue and half chat requests.

    The choice is a pure function of the split and the seed; a shorter list is the beginning of a longer one.
    """
    tokenizer = model.base.tokenizer
    shuffled = random.Random(seed)
    code = list(completion_prompts(split))
    chat = list(chat_pairs(split))
    shuffled.shuffle(code)
    shuffled.shuffle(chat)
    prompts: list[list[int]] = []
    for code_text, pair in zip_longest(code, chat):
        if len(prompts) >= count:
            break
        if code_text is not None:
            ids = tokenizer(code_text[-4 * PROMPT_TOKENS :], add_special_tokens=False).input_ids[-PROMPT_TOKENS:]
            prompts.append(ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids])
        if pair is not None:
            prompts.append(model.chat_prompt(pair.messages[:1]))
    return prompts[:count]


def conversations(source: Source) -> Iterator[Prompt]:
    """The conversations of a source without their answers, which may be missing; without token ids yet.

    Conversations without a user turn are skipped and counted in one warning.

    Raises:
        ValueError: A record is not a conversation (names its place), or no record has a question.
    """

    def parse(place: str, record: Mapping[str, Any]) -> Iterator[Prompt]:
        yield Prompt(asked(record), place=place)

    return source.parsed(parse, "a question to answer")


def asked(record: Mapping[str, Any]) -> tuple[tuple[Message, ...], ...]:
    """The messages before each answer of a conversation; answers may be missing.

    Raises:
        ValueError: It is not a conversation, or has no user turn (NoAnswerError).
    """
    turns = questions(record)
    if turns is None:
        raise ValueError("no prompt; give messages that begin with a user turn, or prompt")
    if not (found := _questions(turns)):
        raise NoAnswerError("it has no user turn")
    return found


def fitting(model: MedusaModel, prompts: Iterable[Prompt], max_new_tokens: int) -> list[Prompt]:
    """The prompts that leave room for an answer in the base's context, shortest first, with their token ids.

    Prompts that the base's chat template refuses (for example with two successive user turns) are left out and counted
    in one warning.

    Raises:
        ValueError: No prompt leaves room, or the template refuses all.
    """
    encoded: list[Prompt] = []
    refused: list[str] = []
    for prompt in prompts:
        try:
            encoded.append(prompt if prompt.ids else replace(prompt, ids=tuple(model.chat_prompt(prompt.asked[0]))))
        except ValueError as error:
            refused.append(named(prompt, error))
    if refused and not encoded:
        raise ValueError(f"prompts ({len(refused)}) are all refused; the first: {refused[0]}")
    if refused:
        total = len(refused) + len(encoded)
        logger.warning("%d of %d prompts are refused and left out; the first: %s", len(refused), total, refused[0])
    room = model.base.context_length - max_new_tokens
    found = sorted((prompt for prompt in encoded if len(prompt.ids) <= room), key=lambda prompt: len(prompt.ids))
    if not found:
        raise ValueError(f"prompts ({len(encoded)}) leave no room for {max_new_tokens} tokens; shorten them")
    if len(found) < len(encoded):
        logger.warning(
            "%d of %d prompts leave no room for %d tokens in the base's context and are left out",
            len(encoded) - len(found), len(encoded), max_new_tokens,
        )  # fmt: skip
    return found


def _questions(turns: Iterable[Mapping[str, Any]]) -> tuple[tuple[Message, ...], ...]:
    """The messages before each answer of any origin; an unanswered last turn is a question too.

    The conversation ends before the first turn of a tool, which answers a call that the base may not make.
    """
    groups: list[tuple[Message, ...]] = []
    group: list[Message] = []
    for turn in turns:
        role = turn["role"]
        if role not in ("user", "assistant", *INSTRUCTIONS):
            break
        if role != "assistant":
            group.append({"role": role, "content": turn["content"]})
        elif any(asked["role"] not in INSTRUCTIONS for asked in group):
            groups.append(tuple(group))
            group = []
    if any(asked["role"] not in INSTRUCTIONS for asked in group):
        groups.append(tuple(group))
    return tuple(groups)
