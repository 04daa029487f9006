"""Measures how fast a base answers and heads train on this machine."""

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
from medusa.base.names import full_name, resolve_base
from medusa.clock import machine_memory
from medusa.cpu import native
from medusa.data.exchange import BATCH, Prompt
from medusa.data.prompts import fitting
from medusa.data.sources import Sample
from medusa.formats import load_heads
from medusa.io.hub import fetch_heads
from medusa.train.base import slow_in_bfloat16
from medusa.train.own import given as given_answers
from medusa.train.own.answers import answer_settings
from medusa.train.own.asked import CHAT, CHAT_SETTINGS, CODE, beginnings, kind_of, some
from medusa.train.own.plan import Asked, held_out
from medusa.train.own.settings import Facts, Values, continued_values, shape_values
from medusa.train.own.training import full_recipe
from medusa.train.own.trial import Answering, Single, Training, answering, single, training

READ_SECONDS, WRITE_SECONDS = 30.0, 10.0
"""Approximate seconds of a trial for prompts, and for their answers."""
FEWEST_TOGETHER = 4
LEAST_ENDED = 0.2
"""Least share of its prompts that a base must finish; otherwise it writes none."""
MOST, MOST_CODE = 50_000, 5000
"""Largest numbers of conversations from templates, and for the embedded base (functions of the standard library)."""
MEMORY_SHARE = 0.5
"""Largest share of the machine's memory for a base in float32."""


@dataclass(frozen=True)
class Measured:
    """A base and its speeds."""

    facts: Facts
    kind: str
    """The kind of prompts."""
    dtype: str
    """Dtype in which it answers."""
    shape: Values
    """Recipe values that do not depend on the number of answers."""
    turns: float
    """Average number of answers of a conversation."""
    most: int
    """Number of conversations for which there are prompts."""
    alone: Single
    answers: Answering
    prompts: Answering | None
    """Speed of writing prompts; None = the base writes none."""
    training: Training
    loading: float
    """Seconds for imports and for loading the base."""
    given: Sequence[Sample] = ()
    """Answers that were given already, in the order of their time."""


def load(base: str, dtype: str = "") -> MedusaModel:
    """Load the base for answering; without `dtype` in its own, or in a faster one.

    Raises:
        OSError, ValueError: it does not exist, or cannot be decoded.
    """
    return MedusaModel.from_pretrained(base=full_name(base), dtype=getattr(torch, dtype) if dtype else None)


def measure(asked: Asked, found: Sequence[Prompt], out: Path, processes: int, began: float) -> Measured:
    """Load the base for answering, then for training, and time both on a few rows.

    Args:
        asked: the user's request.
        found: the prompts of the user's file.
        out: the directory of the run.
        processes: number of training processes.
        began: `time.monotonic()` at the start of this process.
    """
    importing = time.monotonic() - began
    smollm2.locate(resolve_base(asked.base))  # downloads, conversions and compilation happen only once
    native.available()
    began = time.monotonic()
    model = load(asked.base)
    loading = importing + time.monotonic() - began
    facts, given = Facts.of(model.base, processes), list[Sample]()
    if asked.answers:
        given = given_answers.read_given(asked.answers, model.base.tokenizer, model.base.vocab_size)
        found = [Prompt(ids=tuple(sample.prompt)) for sample in given[-BATCH:]]
    known = len(given or found)
    kind = given_answers.KIND if given else kind_of(model, asked.prompts)
    dtype = training_dtype(model.base, facts)
    if dtype == "float32" and slow_in_bfloat16(model.base.device) and not model.base.packed:
        model = load(asked.base, dtype)  # decoding many answers together is faster in it too
    prompts = fitting(model, some(model, kind, found), facts.answer_tokens)
    alone = single(model, prompts[len(prompts) // 2])
    mean = fmean(len(prompt.ids) for prompt in prompts)
    together = min(len(prompts), max(FEWEST_TOGETHER, int(READ_SECONDS / (alone.prompt_token * mean))))
    spread = [prompts[number * len(prompts) // together] for number in range(together)]
    settings = answer_settings(facts.answer_tokens)
    answers = given_answers.answering(given) if given else answering(model, spread, settings, WRITE_SECONDS)
    begun = beginnings(model, kind, together) if kind == CHAT else []
    own = answering(model, begun, [CHAT_SETTINGS], WRITE_SECONDS) if begun else None
    answers_in, turns = str(model.base.dtype).removeprefix("torch."), fmean(len(p.asked) or 1 for p in prompts)
    del model
    free()
    longest = given_answers.longest(given) if given else answers.longest_prompt + facts.answer_tokens
    shape = {"base.name": asked.base, "base.dtype": dtype, **shape_values(facts, longest)}
    if asked.heads:
        shape |= continued_values(asked.heads, load_heads(fetch_heads(asked.heads)).config, shape)
    return Measured(
        facts=facts,
        kind=kind,
        dtype=answers_in,
        shape=shape,
        turns=turns,
        most=known - held_out(known) if known else MOST_CODE if kind == CODE else MOST,
        alone=alone,
        answers=answers,
        prompts=own if own and own.ends >= LEAST_ENDED else None,
        training=training(full_recipe(shape, out), answers.texts),
        loading=loading,
        given=given,
    )


def free() -> None:
    """Free the memory of a base that has no references any more."""
    gc.collect()
    torch.cuda.empty_cache()


def training_dtype(base: BaseModel, facts: Facts) -> str:
    """`base.dtype` of the recipe; a measured choice is written down, so that it is the same after each start."""
    if base.device.type == "cuda":
        return "auto"
    wide = base.dtype != torch.bfloat16 or slow_in_bfloat16(base.device)
    return "float32" if wide and 4 * facts.parameters < MEMORY_SHARE * machine_memory() else "bfloat16"
