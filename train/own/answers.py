"""The base answers the prompts: training data for heads, and held-out answers for the evaluation."""

from collections.abc import Sequence
from pathlib import Path

from medusa import MedusaModel
from medusa.data.exchange import Prompt, Settings
from medusa.data.local import LocalAnswerer
from medusa.data.prompts import fitting
from medusa.data.regenerate import regenerate
from medusa.train.own.asked import Watched
from medusa.train.own.plan import Plan
from medusa.train.own.screen import Tell

TRAIN, HELDOUT = "data/train", "data/heldout.jsonl"
"""Paths of the answers in the directory of the run."""
GREEDY, DRAWN, GIVEN = f"{TRAIN}/greedy.jsonl", f"{TRAIN}/drawn.jsonl", f"{TRAIN}/given.jsonl"
"""Files of training data; given answers stand alone."""


def answer_settings(most: int) -> tuple[Settings, Settings]:
    """Settings of greedy and of sampled answers, half of each, because heads draft for both."""
    return Settings(most), Settings(most, temperature=0.8, top_p=0.95)


def answered(plan: Plan, out: Path) -> bool:
    """Whether all answers of a plan exist."""
    names = (GIVEN, HELDOUT) if plan.asked.answers else (GREEDY, DRAWN, HELDOUT)
    return all((out / name).exists() for name in names)


def answer(
    plan: Plan, model: MedusaModel, out: Path, train: Sequence[Prompt], heldout: Sequence[Prompt], tell: Tell
) -> None:
    """Answer all prompts; complete files are kept, and unfinished ones are continued.

    Args:
        plan: the plan.
        model: the base.
        out: the directory of the run.
        train: prompts of the training data.
        heldout: held-out prompts.
        tell: called with the progress.
    """
    greedy, drawn = answer_settings(plan.answer_tokens)
    parts = [
        (HELDOUT, heldout, greedy),
        (GREEDY, train[::2], greedy),
        (DRAWN, train[1::2], drawn),
    ]
    total, before = sum(len(prompts) for _, prompts, _ in parts), 0
    for name, prompts, settings in parts:
        before += len(prompts)

        def left(count: int, ended: int = before) -> None:
            tell((ended - count) / total, f"{ended - count:,} of {total:,}")

        if not (out / name).exists():
            asked = fitting(model, prompts, plan.answer_tokens)
            made_by = {"base": model.base.name, **vars(settings)}
            regenerate(asked, Watched(LocalAnswerer(model, settings), left), out / name, made_by, shown=False)
        left(0)
