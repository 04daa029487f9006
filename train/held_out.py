"""Held-out samples: one process reads them for all, and removes those that are in the training data."""

import logging
from dataclasses import dataclass

import torch

from medusa.base.model import BaseModel
from medusa.data.packing import PackedRows, pack, sample_digest
from medusa.data.sources import Sample, Source, read_samples
from medusa.train.config import DataRecipe, EvaluateRecipe
from medusa.train.evaluate import held_out_prompts, held_out_rows
from medusa.train.recipe_file import RecipeError

LOGGER = logging.getLogger("medusa.train")
LARGEST_OVERLAP = 0.1
"""Largest share of held-out samples that may be in the training data too; they are left out of the evaluation."""


@dataclass(frozen=True)
class HeldOut:
    """The data of evaluations, small enough to be sent to all processes."""

    rows: PackedRows
    """Rows for the accuracy of each head."""
    prompts: list[list[int]]
    """Prompts for the tokens per step."""


def read_held_out(data: DataRecipe, options: EvaluateRecipe, base: BaseModel, training: PackedRows) -> HeldOut | None:
    """Read the data of a run's evaluations; None if the recipe names no held-out samples.

    Args:
        data: where the samples are.
        options: numbers of rows and prompts, and the longest answers.
        base: the base; its tokenizer and context decide which samples fit.
        training: the training rows.

    Raises:
        RecipeError: too many of the samples are in the training data.
        ValueError, OSError: the samples cannot be read.
    """
    if not data.heldout:
        return None
    longest = max(1, base.context_length - options.max_new_tokens)
    limit = data.limit if data.streaming else 0
    source = Source(data.heldout, data.heldout_split, data.subset, data.streaming, limit)
    samples = _unseen(read_samples(source, base.tokenizer, base.vocab_size), training, data)
    packed = pack(samples, data.row_tokens)
    return HeldOut(
        packed.take(held_out_rows(len(packed), options.rows)),
        held_out_prompts(samples, options.prompts, longest) if options.prompts else [],
    )


def _unseen(samples: list[Sample], training: PackedRows, data: DataRecipe) -> list[Sample]:
    """The samples that are not in the training data.

    Common samples are removed here, because `data.heldout` may change during a run, and its training rows may not.
    """
    digests = torch.tensor([sample_digest(sample) for sample in samples])
    seen = torch.isin(digests, training.samples)
    count = int(seen.sum())
    if not count:
        return samples
    what = f"data.train ({data.train}) holds {count} of the {len(samples)} samples of data.heldout ({data.heldout})"
    if count > LARGEST_OVERLAP * len(samples):
        raise RecipeError(
            f"{what}, and heads would be measured on their own training data; remove them from one of the two"
        )
    LOGGER.warning("%s; the evaluation leaves them out", what)
    return [sample for sample, trained_on in zip(samples, seen.tolist(), strict=True) if not trained_on]
