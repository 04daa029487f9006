"""What a base answers and learns per second on this machine."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from medusa import MedusaModel
from medusa.base import smollm2
from medusa.base.model import BaseModel
from medusa.base.names import resolve_base
from medusa.clock import machine_memory
from medusa.cpu import native
from medusa.data import resolve_base_name
from medusa.data.exchange import BATCH, Prompt
from medusa.data.prompts import fitting
from medusa.train.base import slow_in_bfloat16
from medusa.train.own.answers import answer_settings
from medusa.train.own.asked import CHAT, CHAT_SETTINGS, CODE, FROM_FILE, beginnings, kind_of, some
from medusa.train.own.plan import held_out
from medusa.train.own.settings import Facts, Values, shape_values
from medusa.train.own.training import full_recipe
from medusa.train.own.trial import Answering, Single, Training, answering, single, training

READ_SECONDS, WRITE_SECONDS = 30.0, 10.0
"""For the prompts of a trial, about, and for their answers."""
FEWEST_TOGETHER = 4
LEAST_ENDED = 0.2
"""Share of its prompts that a base must end, or it is not asked for any."""
MOST, MOST_CODE = 50_000, 5000
"""Conversations where they are made up, and for the embedded base; the standard library has about so many functions."""
MEMORY_SHARE = 0.5
"""Of the machine's memory that a base in float32 may take."""


@dataclass(frozen=True)
class Measured:
    """A base and how fast it is."""

    facts: Facts
    kind: str
    """Where prompts come from."""
    dtype: str
    """In which it answers."""
    shape: Values
    """Of the recipe: what does not depend on the number of answers."""
    turns: float
    """Answers of a conversation, on average."""
    most: int
    """Conversations that there are prompts for."""
    alone: Single
    answers: Answering
    prompts: Answering | None
    """That it writes in a user's place; None = it does not."""
    training: Training
    loading: float
    """Seconds to import all that is needed and to load the base."""


def load(base: str, dtype: str = "") -> MedusaModel:
    """The base as it answers; in its own dtype, or the one that is faster here, where none is named.

    Raises:
        OSError, ValueError: there is none, or it cannot be decoded.
    """
    return MedusaModel.from_pretrained(base=resolve_base_name(base), dtype=getattr(torch, dtype) if dtype else None)


def measure(base: str, path: str, found: Sequence[Prompt], out: Path, processes: int, began: float) -> Measured:
    """Load the base as it answers, then as it is trained with, and time both on a few rows.

    Args:
        base: its name.
        path: the user's file of prompts; "" = none.
        found: what is in it.
        out: the directory of the run.
        processes: that will train.
        began: `time.monotonic()` when this process did.
    """
    importing = time.monotonic() - began
    smollm2.locate(resolve_base(base))  # what is downloaded, converted or compiled once belongs to no later start
    native.available()
    began = time.monotonic()
    model = load(base)
    loading = importing + time.monotonic() - began
    facts, kind = Facts.of(model.base, processes), kind_of(model, path)
    dtype = training_dtype(model.base, facts)
    if dtype == "float32" and slow_in_bfloat16(model.base.device) and not model.base.packed:
        model = load(base, dtype)  # many answers together are faster in it too
    prompts = fitting(model, some(model, kind, found, BATCH), facts.answer_tokens)
    alone = single(model, prompts[len(prompts) // 2])
    mean = fmean(len(prompt.ids) for prompt in prompts)
    together = min(len(prompts), max(FEWEST_TOGETHER, int(READ_SECONDS / (alone.prompt_token * mean))))
    spread = [prompts[number * len(prompts) // together] for number in range(together)]
    answers = answering(model, spread, answer_settings(facts.answer_tokens), WRITE_SECONDS)
    begun = beginnings(model, kind, together) if kind == CHAT else []
    own = answering(model, begun, [CHAT_SETTINGS], WRITE_SECONDS) if begun else None
    answers_in, turns = str(model.base.dtype).removeprefix("torch."), fmean(len(p.asked) or 1 for p in prompts)
    del model
    free()
    longest = answers.longest_prompt + facts.answer_tokens
    shape = {"base.name": base, "base.dtype": dtype, **shape_values(facts, longest)}
    return Measured(
        facts=facts,
        kind=kind,
        dtype=answers_in,
        shape=shape,
        turns=turns,
        most=len(found) - held_out(len(found)) if kind == FROM_FILE else MOST_CODE if kind == CODE else MOST,
        alone=alone,
        answers=answers,
        prompts=own if own and own.ends >= LEAST_ENDED else None,
        training=training(full_recipe(shape, out), answers.texts),
        loading=loading,
    )


def free() -> None:
    """Give the memory of a base that is not held any more to whoever loads it next."""
    gc.collect()
    torch.cuda.empty_cache()


def training_dtype(base: BaseModel, facts: Facts) -> str:
    """`base.dtype` of the recipe: named where it would be found out, so that it is the same after each start."""
    if base.device.type == "cuda":
        return "auto"
    wide = base.dtype != torch.bfloat16 or slow_in_bfloat16(base.device)
    return "float32" if wide and 4 * facts.parameters < MEMORY_SHARE * machine_memory() else "bfloat16"
