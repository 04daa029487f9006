"""Answers that the base has given already, as a server records them: they are learned from as they are.

Some are held out, and none of those has a prompt that the heads are trained on.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from medusa.data.exchange import BATCH
from medusa.data.sources import Sample, Source, samples
from medusa.files import replace_text
from medusa.train.own.answers import GIVEN, HELDOUT
from medusa.train.own.plan import FEWEST, LEAST_HELD_OUT, Plan
from medusa.train.own.trial import Answering

KIND = "given answers"


def read_given(path: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> list[Sample]:
    """The conversations of a file or directory in the order of its records.

    A record that another one continues, or repeats, becomes part of it: each turn of a conversation is a request. Texts
    without a prompt are left out.

    Raises:
        OSError: There is no such file.
        ValueError: A record is not a sample, or there are too few.
    """
    found = [sample for sample in samples(Source(path), tokenizer, vocabulary) if not sample.loss_mask[0]]
    texts = [sample.input_ids.numpy().astype(">i4").tobytes() for sample in found]  # in the order of their tokens
    kept = dict(enumerate(found))
    for here, after in pairwise(sorted(kept, key=texts.__getitem__)):  # what continues a text stands right after it
        if texts[after].startswith(texts[here]):
            mask, longer = kept.pop(here).loss_mask, kept[after].loss_mask.clone()
            longer[: len(mask)] |= mask
            kept[after] = replace(kept[after], loss_mask=longer)
    if len(kept) < FEWEST + LEAST_HELD_OUT:
        raise ValueError(
            f"answers ({path}) hold {len(kept)} different conversations with a prompt, and at least "
            f"{FEWEST + LEAST_HELD_OUT} are needed, {LEAST_HELD_OUT} of which are held out; record more, or leave "
            "--answers out"
        )
    return [kept[number] for number in sorted(kept)]


def answering(given: Sequence[Sample]) -> Answering:
    """Given answers as if they had been timed: they take no time. Its texts have their numbers of tokens."""
    some = given[:: max(1, len(given) // BATCH)]
    marked = [int(sample.loss_mask.sum()) for sample in some]
    texts = [
        (sample.input_ids[:-count].tolist(), sample.input_ids[-count:].tolist())
        for sample, count in zip(some, marked, strict=True)
    ]
    return Answering(0.0, 0.0, 0, sum(marked) / len(marked), 1.0, texts)


def longest(given: Sequence[Sample]) -> int:
    """95th percentile of their tokens."""
    return sorted(len(sample.input_ids) for sample in given)[len(given) * 19 // 20]


def write_given(plan: Plan, given: Sequence[Sample], out: Path) -> None:
    """Write the newest conversations of the plan: training data, and held-out answers."""
    newest = given[-plan.conversations - plan.heldout :]
    ordered = sorted(((_prompt(sample), sample) for sample in newest), key=itemgetter(0))
    asked, heldout = zip(*ordered[: plan.heldout], strict=True)
    learnt = [sample for prompt, sample in ordered[plan.heldout :] if prompt not in asked]
    if len(learnt) < FEWEST:
        raise ValueError(
            f"answers ({plan.asked.answers}) have {len(learnt)} other prompts than the {plan.heldout} held-out ones, "
            f"and at least {FEWEST} are needed; record more"
        )
    for name, part in ((GIVEN, learnt), (HELDOUT, heldout)):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        lines = (
            {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.int().tolist()} for sample in part
        )
        replace_text(out / name, "".join(json.dumps(line) + "\n" for line in lines))


def _prompt(sample: Sample) -> bytes:
    """Digest of its prompt: a random order in which equal prompts stand together."""
    return hashlib.sha256(json.dumps(sample.prompt).encode()).digest()
