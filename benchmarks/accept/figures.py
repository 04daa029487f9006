"""Figures from counts, by group of questions, with 95 % bootstrap intervals over questions.

Legend: G questions of a group, X figures, R runs, D depths, C outcomes of first guesses.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa.benchmarks.accept.measure import FAR, LOW, NEAR, OUTSIDE, RIGHT, Counts, stretches
from medusa.benchmarks.run.measure import TAIL, draws

LENGTHS = (0, 128, 256, 512, 1024, 2048)
"""Lower bounds of the groups by length of the prompt, in tokens."""
ALL, CATEGORY, LENGTH, PLACE = "all", "category", "prompt tokens", "place in the answer"
"""Criteria by which questions and places are grouped."""

Estimate = dict[str, float]
"""A value, the lower and upper end of its interval, and its denominator."""


class Group(NamedTuple):
    """A group of questions."""

    of: str
    name: str
    questions: list[int]


def grouped(kinds: Mapping[str, Sequence[int]], prompt_tokens: Sequence[int]) -> list[Group]:
    """Groups: all questions, those of each category, and those with prompts of similar length."""
    found = [Group(ALL, ALL, list(range(len(prompt_tokens))))]
    found += [Group(CATEGORY, kind, list(own)) for kind, own in kinds.items()]
    for first, after in [*pairwise(LENGTHS), (LENGTHS[-1], None)]:
        own = [at for at, count in enumerate(prompt_tokens) if first <= count and (after is None or count < after)]
        if own:
            found.append(Group(LENGTH, f"{first} on" if after is None else f"{first} to {after - 1}", own))
    return found


def figures(counts: Counts, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row for each group: tokens per step and acceptance by depth for each shape and size, and first guesses.

    Groups without a place for a draft are left out; groups of places have only first guesses.

    Raises:
        ValueError: There is no place for a draft.
    """
    if not counts.firsts.any():
        raise ValueError(
            f"answers ({len(counts.firsts)}) have one token each, and nothing is drafted; ask other questions"
        )
    deepest = int((counts.steps[:, :, 0, 1:].sum((0, 1)) > 0).sum())
    rows = []
    for group in groups:
        if not counts.firsts[group.questions].any():
            continue
        steps_GR2D = counts.steps[group.questions][..., : 1 + deepest]
        found = iter(estimates(steps_GR2D[:, :, 0].flatten(1), steps_GR2D[:, :, 1].flatten(1)))
        row: dict[str, Any] = {"of": group.of, "group": group.name, "questions": len(group.questions)}
        row |= {"tokens_per_step": {}, "acceptance": {}}
        for shape, nodes in counts.runs:
            row["tokens_per_step"].setdefault(shape, {})[nodes] = next(found)
            row["acceptance"].setdefault(shape, {})[nodes] = [next(found) for _ in range(deepest)]
        rows.append(row | _first(counts.firsts[group.questions].sum(1)))
    for place, name in enumerate(stretches()):
        firsts_QC = counts.firsts[:, place]
        if firsts_QC.any():
            own = {"of": PLACE, "group": name, "questions": int(firsts_QC.any(1).sum())}
            rows.append(own | _first(firsts_QC))
    return rows


def _first(firsts_GC: Tensor) -> dict[str, Any]:
    """First guesses at all places: shares of right ones and of the other outcomes."""
    (right,) = estimates(firsts_GC[:, RIGHT : RIGHT + 1], firsts_GC.sum(1, keepdim=True))
    names = {"second to fourth": NEAR, "fifth to sixteenth": FAR, "lower": LOW, "outside of the vocabulary": OUTSIDE}
    places = int(firsts_GC.sum())
    shares = {name: int(firsts_GC[:, fate].sum()) / places for name, fate in names.items()}
    return {"places": places, "first_right": right, "first_wrong": shares}


def estimates(above_GX: Tensor, below_GX: Tensor) -> list[Estimate | None]:
    """Ratios of sums, with intervals; None if the denominator is 0.

    Args:
        above_GX: Numerators by question.
        below_GX: Denominators by question.
    """
    generator, (above_GX, below_GX) = torch.Generator().manual_seed(0), (above_GX.double(), below_GX.double())
    drawn_SG = draws(len(above_GX), generator)
    values_X, drawn_SX = above_GX.sum(0) / below_GX.sum(0), (drawn_SG @ above_GX) / (drawn_SG @ below_GX)
    ends_2X = drawn_SX.nanquantile(torch.tensor([TAIL, 1 - TAIL], dtype=torch.float64), dim=0)
    ends_X = ends_2X.T.tolist()
    return [
        {"value": value, "low": low, "high": high, "of": of} if of else None
        for value, (low, high), of in zip(values_X.tolist(), ends_X, below_GX.sum(0).tolist(), strict=True)
    ]
