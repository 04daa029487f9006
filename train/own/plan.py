"""What is done, decided once from what was measured, so that a run that was stopped ends like one that was not."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from medusa.files import header, read_json, write_json

STAGES = ("prompts", "answers", "training", "comparison")
FILE = "plan.json"
REMEDY = "give another --out, or remove it"
MOST_EPOCHS = 4
PASS_WORTH = 0.7
"""What one more pass over the same answers is worth, beside the pass before it.

Between 1, which repeated text is worth up to four passes in Muennighoff et al. 2023 (arXiv:2305.16264), and what small
heads make of it, which learn few answers by heart (docs/heads.md, "A real base").
"""
FEWEST = 32
"""Conversations that heads are trained on."""
LEAST_HELD_OUT, MOST_HELD_OUT, HELD_OUT_SHARE = 8, 96, 0.05


@dataclass(frozen=True)
class Asked:
    """What the user has asked for."""

    base: str
    hours: float
    prompts: str
    """A file; "" = none."""
    content_of_prompts: str
    """Fingerprint of that file."""


@dataclass(frozen=True)
class Plan:
    """All that the result depends on."""

    asked: Asked
    kind: str
    """Where prompts come from, see `medusa.train.own.asked`."""
    written: int
    """Prompts that the base begins to write."""
    conversations: int
    """That are trained on; fewer where prompts are refused."""
    heldout: int
    """That are not."""
    dtype: str
    """In which the base answers."""
    answer_tokens: int
    """Of an answer, at most."""
    compared: int
    """Held-out prompts that are decoded at the end."""
    state_bytes: float
    """Of all hidden states on disk; 0 = they are not kept."""
    reading: float
    """Seconds of the base's pass before the first step of training; 0 = it is made as training goes."""
    seconds: dict[str, float]
    """How long each stage takes, as far as was known."""
    recipe: dict[str, Any]
    """Values by their dotted keys."""

    def save(self, out: Path) -> None:
        """Write it into the directory of the run."""
        write_json(out / FILE, {**header("plan"), **asdict(self)})

    @staticmethod
    def load(out: Path, asked: Asked) -> "Plan | None":
        """The plan of a run that was begun; None = it was not.

        Raises:
            ValueError: the run was begun with other arguments.
        """
        if not (out / FILE).exists():
            return None
        values = read_json(out / FILE, "plan", REMEDY)
        try:
            before = Asked(**values["asked"])
            plan = Plan(before, **{each.name: values[each.name] for each in fields(Plan) if each.name != "asked"})
        except (KeyError, TypeError) as error:
            raise ValueError(f"plan ({out / FILE}) lacks a value ({error}); {REMEDY}") from None
        for name, now in asdict(asked).items():
            if now != (then := getattr(before, name)):
                what = name.replace("_", " ")
                raise ValueError(
                    f"{what} ({now or 'none'}) differs from that of the run in {out} ({then or 'none'}); {REMEDY}"
                )
        return plan


class Costs(NamedTuple):
    """Seconds per conversation, and of all together."""

    prompt: float
    """To write its prompt."""
    answer: float
    """To answer it."""
    first: float
    """Of its first pass in training: through the base, and through the heads."""
    later: float
    """Of each further pass."""
    fixed: Mapping[str, float]
    """By stage: what does not depend on the number of conversations."""

    def of(self, conversations: int, epochs: int, stage: str) -> float:
        """Seconds of a stage."""
        each = {
            "prompts": self.prompt,
            "answers": self.answer,
            "training": self.first + (epochs - 1) * self.later,
        }.get(stage, 0.0)
        return self.fixed.get(stage, 0.0) + conversations * each

    def first_pass(self, conversations: int) -> float:
        """Seconds of the base's pass over all of them."""
        return conversations * (self.first - self.later)


def divide(seconds: float, costs: Costs, most: int) -> tuple[int, int]:
    """Divide the time between answers and passes over them: (conversations, epochs).

    More answers teach more than more passes (`PASS_WORTH`), and cost more: what is trained on is answered once. The
    division is the one with the largest product of both. All prompts of a short list are answered.

    Raises:
        ValueError: the time is too short for a few conversations; says how much is needed.
    """
    left = seconds - sum(costs.fixed.values())

    def affordable(epochs: int) -> int:
        each = costs.prompt + costs.answer + costs.first + (epochs - 1) * costs.later
        return max(0, min(most, int(left / each)))

    possible = [epochs for epochs in range(1, MOST_EPOCHS + 1) if affordable(epochs) >= FEWEST]
    if possible:
        epochs = max(possible, key=lambda epochs: affordable(epochs) * worth(epochs))
        return affordable(epochs), epochs
    needed = sum(costs.of(FEWEST, 1, stage) for stage in STAGES)
    lacking = math.ceil((needed - seconds) / 36 + 1) / 100
    raise ValueError(
        f"time ({seconds / 3600:.3g} hours are left) is too short here for {FEWEST} answers, which take "
        f"{needed / 3600:.2g} hours with training and comparison; raise --hours by {lacking:.2f}"
    )


def worth(epochs: int) -> float:
    """What so many passes over the same answers are worth, in first passes."""
    return sum(PASS_WORTH**number for number in range(epochs))


def held_out(conversations: int) -> int:
    """How many of so many conversations are not trained on."""
    return min(MOST_HELD_OUT, max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * conversations)))
