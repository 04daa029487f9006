"""The plan of a run, made once from measurements, so that a stopped run ends like one that was not stopped."""

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
"""Value of one more pass over the same answers, relative to the previous pass.

It lies between 1, the value of repeated text for up to four passes in Muennighoff et al. 2023 (arXiv:2305.16264), and
the value for small heads, which overfit few answers (docs/heads.md, "A real base").
"""
FEWEST = 32
"""Least number of conversations to train heads on."""
LEAST_HELD_OUT, MOST_HELD_OUT, HELD_OUT_SHARE = 8, 96, 0.05


@dataclass(frozen=True)
class Asked:
    """The user's request."""

    base: str
    hours: float
    prompts: str
    """A file of prompts; "" = none."""
    content_of_prompts: str
    """Fingerprint of that file."""
    content_of_base: str = ""
    """Digest of a base in a local folder, which may have been trained again; "" = of another base."""
    answers: str = ""
    """A file or directory of answers that were given already, which may have grown since; "" = none."""
    heads: str = ""
    """Heads whose training continues; "" = new ones."""
    content_of_heads: str = ""
    """Digest of heads in a local folder."""


@dataclass(frozen=True)
class Plan:
    """All values on which the result depends."""

    asked: Asked
    kind: str
    """Kind of prompts, see `medusa.train.own.asked`."""
    written: int
    """Number of prompts that the base begins to write."""
    conversations: int
    """Conversations of the training data; fewer if prompts are refused."""
    heldout: int
    """Held-out conversations."""
    dtype: str
    """Dtype in which the base answers."""
    answer_tokens: int
    """Most tokens of an answer."""
    compared: int
    """Number of held-out prompts that are decoded at the end."""
    state_bytes: float
    """Bytes of all hidden states on disk; 0 = they are not kept."""
    reading: float
    """Seconds of the base's pass before the first training step; 0 = it is made during training."""
    seconds: dict[str, float]
    """Estimated seconds of each stage."""
    recipe: dict[str, Any]
    """Recipe values by their dotted keys."""

    def save(self, out: Path) -> None:
        """Write the plan into the directory of the run.

        Raises:
            ValueError: another process has begun a run there meanwhile, whose plan would be lost.
        """
        if (out / FILE).exists():
            raise ValueError(f"--out ({out}) holds a run that another process has just begun; give another directory")
        write_json(out / FILE, {**header("plan"), **asdict(self)})

    @staticmethod
    def load(out: Path, asked: Asked) -> "Plan | None":
        """The plan of a run that was begun; None = there is none.

        Raises:
            ValueError: the run was begun with other arguments.
        """
        if not (out / FILE).exists():
            return None
        values = read_json(out / FILE, "plan", REMEDY)
        try:
            before = Asked(**{"content_of_base": asked.content_of_base} | values["asked"])
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
    """Seconds per conversation, and fixed seconds."""

    prompt: float
    """Writing its prompt."""
    answer: float
    """Answering it."""
    first: float
    """Its first pass in training: through the base, and through the heads."""
    later: float
    """Each further pass."""
    fixed: Mapping[str, float]
    """Fixed seconds by stage."""

    def of(self, conversations: int, epochs: int, stage: str) -> float:
        """Seconds of a stage."""
        each = {
            "prompts": self.prompt,
            "answers": self.answer,
            "training": self.first + (epochs - 1) * self.later,
        }.get(stage, 0.0)
        return self.fixed.get(stage, 0.0) + conversations * each


def divide(seconds: float, costs: Costs, most: int) -> tuple[int, int]:
    """Divide the time between answers and passes over them: (conversations, epochs).

    More answers teach more than more passes (`PASS_WORTH`), but cost more, because each must be generated once. The
    result is the division with the largest product of both. All prompts of a short list are answered.

    Raises:
        ValueError: the time is too short for a few conversations; the message says how much is needed.
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
    """Value of this number of passes over the same answers, in units of a first pass."""
    return sum(PASS_WORTH**number for number in range(epochs))


def held_out(conversations: int) -> int:
    """Number of held-out conversations for this number of conversations."""
    return min(MOST_HELD_OUT, max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * conversations)))
