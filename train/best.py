"""The heads of the best evaluation so far, for runs that end when held-out acceptance no longer grows.

The run directory keeps them in best/. All else is known from the evaluations in metrics.jsonl, so that a resumed run
decides as an uninterrupted one would.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from torch import Tensor

from medusa.formats import load_heads
from medusa.formats.native import save_heads
from medusa.heads import DraftHeads
from medusa.train.config import EvaluateRecipe
from medusa.train.run_directory import RunDirectory
from medusa.train.workers import Workers

KEY = "heldout_top1"


def chain_length(top1_K: Sequence[float]) -> float:
    """Tokens per step of a chain of drafts, greedily, if head k is right with probability ``top1_K[k]``.

    Each head is measured where the tokens before it are right, so a chain of k drafts is right with the product of the
    first k. Thousands of positions make it a steadier figure than the tokens per step of a few decoded prompts.
    """
    return 1.0 + float(sum(accumulate(top1_K, mul)))


class Best:
    """Heads of the best evaluation; every process has one.

    Args:
        options: The recipe's.
        directory: Of the run, as it is when the run begins or is resumed.
        step: Completed steps then.
        workers: This process among all, which construct it together.
    """

    def __init__(self, options: EvaluateRecipe, directory: RunDirectory, step: int, workers: Workers) -> None:
        self._patience, self._every = options.patience, options.every_steps
        self._directory, self._workers = directory, workers
        self._seen: list[tuple[float, int]] = []
        if self._patience:
            self._seen = workers.from_first(lambda: _evaluations(directory, step))

    def observe(self, step: int, figures: Mapping[str, Any], heads: DraftHeads) -> None:
        """Keep the heads if their evaluation is the best one."""
        if not self._patience or KEY not in figures:
            return
        length = chain_length(figures[KEY])
        if self._workers.rank == 0 and all(length > seen for seen, _ in self._seen):
            with self._directory.writing():
                save_heads(heads, self._directory.best)
        self._seen.append((length, step))

    @property
    def exhausted(self) -> bool:
        """Whether the last so many evaluations brought nothing better than the best one."""
        if not self._patience or not self._seen:
            return False
        best = max(self._seen, key=lambda seen: (seen[0], -seen[1]))[1]
        return self._seen[-1][1] - best >= self._patience * self._every

    def weights(self, figures: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Weights of the best heads, if these are better than the last ones, whose figures are given; else None."""
        length = chain_length(figures[KEY]) if self._patience and KEY in figures else 0.0
        if not length or all(length >= seen for seen, _ in self._seen):
            return None
        best: dict[str, Tensor] = self._workers.from_first(lambda: load_heads(self._directory.best).state_dict())
        return best


def _evaluations(directory: RunDirectory, step: int) -> list[tuple[float, int]]:
    """Chain length and step of the evaluations up to a step; none where their best heads were not kept."""
    if not directory.best.is_dir():
        return []
    records = [record for record in directory.records() if KEY in record and "steps" not in record]
    return [(chain_length(record[KEY]), record["step"]) for record in records if record["step"] <= step]
