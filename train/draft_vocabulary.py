"""Which tokens heads can draft: the most frequent ones of what they learn to predict.

Shapes: R rows, T tokens per row, V vocabulary.
"""

import logging

import torch
from torch import Tensor

from data.packing import IGNORE, PackedRows
from medusa.heads import DraftHeads
from train.recipe_file import RecipeError
from train.workers import Workers

LOGGER = logging.getLogger("train")


def check_draft_vocabulary(size: int, vocab_size: int) -> None:
    """Refuse a size that does not fit the base.

    Args:
        size: `heads.draft_vocab` of the recipe.
        vocab_size: V.

    Raises:
        RecipeError: it is larger than the vocabulary.
    """
    if size > vocab_size:
        raise RecipeError(
            f"heads.draft_vocab ({size}) is more than the vocabulary of the base ({vocab_size}); lower it, or give 0 "
            "for all of it"
        )


def most_frequent_tokens(
    packed: PackedRows, size: int, vocab_size: int, workers: Workers, rows_at_a_time: int = 1024
) -> Tensor:
    """The tokens that are supervised most often, lower ids first where they are equally frequent.

    The same for any number of processes, each of which counts its share of the rows; all of them call it.

    Args:
        packed: training rows.
        size: number of tokens; where fewer are supervised the lowest other ids fill up.
        vocab_size: V.
        workers: this process among all.
        rows_at_a_time: rows that are counted at a time; all of them may be larger than memory.

    Returns:
        int64 [size] token ids, ascending.
    """
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for rows in torch.arange(workers.rank, len(packed), workers.world_size).split(rows_at_a_time):
        counts_V += torch.bincount(packed.input_ids[rows][packed.loss_mask[rows]].long(), minlength=vocab_size)
    counts_V = workers.total(counts_V)
    chosen = counts_V.argsort(descending=True, stable=True)[:size].sort().values
    share = float(counts_V[chosen].sum() / counts_V.sum().clamp(min=1))
    LOGGER.info("heads draft %d of %d tokens, %.2f %% of the supervised ones", size, vocab_size, 100 * share)
    return chosen


def drafted_labels(heads: DraftHeads, labels: Tensor) -> Tensor:
    """Labels as columns of the heads' logits; `IGNORE` where heads cannot draft the token.

    Args:
        heads: the heads.
        labels: int64 token ids, or `IGNORE`.
    """
    if heads.draft_ids is None:
        return labels
    columns = heads.columns(labels)
    return torch.where(columns < 0, IGNORE, columns)
