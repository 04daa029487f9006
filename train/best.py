"""The heads of the best evaluation so far, for runs that end when held-out acceptance no longer grows.

The run directory keeps them in best/, with the step and the held-out rows of their evaluation. All else is known from
the evaluations in metrics.jsonl, so that a resumed run decides as an uninterrupted one would.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from torch import Tensor

from medusa.formats import load_heads
from medusa.formats.native import save_heads
from medusa.heads import DraftHeads
from medusa.train.config import Recipe
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
        recipe: evaluate.patience, evaluate.every_steps, and what it is evaluated on.
        directory: Of the run, as it is when the run begins or is resumed.
        step: Completed steps then.
        workers: This process among all, which construct it together.
    """

    def __init__(self, recipe: Recipe, directory: RunDirectory, step: int, workers: Workers) -> None:
        self._patience, self._every = recipe.evaluate.patience, recipe.evaluate.every_steps
        self._rows = [recipe.data.heldout, recipe.data.heldout_split, recipe.evaluate.rows]
        self._directory, self._workers = directory, workers
        self._seen: list[tuple[float, int]] = []
        if self._patience:
            self._seen = workers.from_first(lambda: self._evaluations(step))

    def observe(self, step: int, figures: Mapping[str, Any], heads: DraftHeads) -> None:
        """Keep the heads if their evaluation is the best one."""
        if not self._patience or KEY not in figures:
            return
        length = chain_length(figures[KEY])
        if self._workers.rank == 0 and all(length > seen for seen, _ in self._seen):
            with self._directory.writing():
                save_heads(heads, self._directory.best)
                since = self._seen[0][1] if self._seen else step  # earlier evaluations were of something else
                kept = json.dumps({"step": step, "since": since, "rows": self._rows})
                (self._directory.best / "evaluation.json").write_text(kept, encoding="utf-8")
        self._seen.append((length, step))

    @property
    def exhausted(self) -> bool:
        """Whether the last so many evaluations brought nothing better than the best one."""
        if not self._patience or not self._seen:
            return False
        return self._seen[-1][1] - self.step >= self._patience * self._every

    @property
    def step(self) -> int:
        """The step of the best heads."""
        return _best_step(self._seen)

    def weights(self, figures: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Weights of the best heads, if these are better than the last ones, whose figures are given; else None."""
        length = chain_length(figures[KEY]) if self._patience and KEY in figures else 0.0
        if not length or all(length >= seen for seen, _ in self._seen):
            return None
        best: dict[str, Tensor] = self._workers.from_first(lambda: load_heads(self._directory.best).state_dict())
        return best

    def _evaluations(self, step: int) -> list[tuple[float, int]]:
        """Chain length and step of the evaluations up to a step; none if best/ holds other heads."""
        try:
            kept = json.loads((self._directory.best / "evaluation.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        records = [record for record in self._directory.records() if KEY in record and "steps" not in record]
        steps = range(kept["since"], step + 1)
        seen = [(chain_length(record[KEY]), record["step"]) for record in records if record["step"] in steps]
        made_again = kept["step"] > step  # with the same heads
        stale = seen and not made_again and kept["step"] != _best_step(seen)
        return [] if stale or kept["rows"] != self._rows else seen


def _best_step(seen: Sequence[tuple[float, int]]) -> int:
    return max(seen, key=lambda one: (one[0], -one[1]))[1]
