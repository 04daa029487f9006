"""Replays known texts with drafters of every size, and counts by question.

Legend: Q questions, R runs (a shape and a size), D depths, P stretches of the answer, C outcomes of first guesses.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from medusa import MedusaModel, Output, Speculation, Tree
from medusa.acceptance import build_rule
from medusa.base.model import BaseModel
from medusa.benchmarks.progress import Progress
from medusa.drafters.choose import Drafters
from medusa.engine.replay import Text, read, replay, tally
from medusa.heads import DraftHeads
from medusa.sampling import sources

DEPTHS = 16
"""D, the largest depth that is counted."""
WIDTH = 16
"""Number of first guesses whose ranks are distinguished."""
STRETCHES = (0, 32, 64, 128, 256)
"""Positions in the answer, in tokens, at which stretches begin."""
RIGHT, NEAR, FAR, LOW, OUTSIDE = range(5)
"""Outcomes of first guesses: the text's token is the best guess, one of the next three, one of ``WIDTH``, or none; or
none because it is not in the heads' draft vocabulary."""
NEAREST = 4
"""Ranks below this number count as near."""


class Counts(NamedTuple):
    """The counts of one drafter.

    Attributes:
        runs: ("tree" or "chain", nodes) of each run.
        steps: int64 [Q, R, 2, 1 + D], see ``tally``.
        firsts: int64 [Q, P, C], outcomes at all places of the answers.
    """

    runs: list[tuple[str, int]]
    steps: Tensor
    firsts: Tensor


class Measured(NamedTuple):
    """The counts of each drafter, and the number of tokens of the answers that are the base's own choice."""

    drafters: dict[str, Counts]
    own: int


class Run:
    """A drafter of one size, with its own state.

    Args:
        model: The model with the drafter's parts.
        base: Its base, which may verify chains only.
        wanted: The drafter, and nodes or a tree.
        full: Trees always have the full size, as with fixed shapes.

    Raises:
        ValueError: The drafter is not available.
    """

    def __init__(self, model: MedusaModel, base: BaseModel, wanted: Speculation, full: bool) -> None:
        self._base, self._wanted, self._rule = base, wanted, build_rule()
        self._drafters = Drafters(base, model.heads, full, model.drafters.parts.draft_model)
        self._drafters.check(wanted, self._rule)
        self._drafter = self._drafters.choose(wanted, 1, self._rule)

    def steps(self, text: Text) -> Tensor:
        """Counts [2, 1 + D] of the steps over one text, from which the drafter may learn."""
        counts = tally(text, replay(self._base, self._drafter, text), DEPTHS)
        ids: list[int] = text.ids.tolist()
        prompt, said = ids[: text.prompt_tokens], Output(text.prompt_tokens, ids[text.prompt_tokens :])
        self._drafters.observe(self._drafter, self._wanted, self._rule, 1, prompt, said)
        return counts

    def firsts(self, text: Text, heads: DraftHeads | None) -> Tensor:
        """[P, C] outcomes of the first guesses at all places of one text."""
        counts, answer = torch.zeros(len(STRETCHES), OUTSIDE + 1, dtype=torch.int64), text.ids[text.prompt_tokens :]
        known = [True] * len(answer) if heads is None else (heads.columns(answer) >= 0).tolist()
        steps = replay(self._base, self._drafter, text, every_place=True)
        for place, step in enumerate(steps, start=1):
            stretch = sum(place >= first for first in STRETCHES) - 1
            counts[stretch, _fate(step.rank, known[place])] += 1
        return counts


def _fate(rank: int | None, known: bool) -> int:
    if rank is None or rank >= WIDTH:
        return LOW if known else OUTSIDE
    return RIGHT if rank == 0 else NEAR if rank < NEAREST else FAR


class Runs:
    """A drafter in all sizes, with trees and with chains.

    Args:
        model: The base and its drafters.
        name: Name of the drafter.
        sizes: Nodes with the root, each at least 2.
        full: See ``Run``.

    Raises:
        ValueError: The drafter is not available.
    """

    def __init__(self, model: MedusaModel, name: str, sizes: Sequence[int], full: bool) -> None:
        base, heads = model.base, model.heads
        shapes = {"tree": base, "chain": base.with_traits(decoding="chain")}
        if base.decoding == "chain":
            del shapes["tree"]
        self._kinds = [(shape, size) for shape in shapes for size in sizes]
        wanted = [(shapes[shape], Speculation(drafter=name, nodes=size)) for shape, size in self._kinds]
        self._runs = [Run(model, verifier, one, full) for verifier, one in wanted]
        survey = Speculation(drafter=name, nodes=max(sizes))
        if name == "heads" and heads is not None:  # their best tokens, of any probability
            survey = Speculation(drafter=name, tree=Tree.full([min(WIDTH, heads.config.output_size)]))
        self._survey = Run(model, base.with_traits(decoding="tree"), survey, full)
        self._heads = heads if any(source.startswith("heads") for source in sources(name)) else None
        self._steps, self._firsts = list[Tensor](), list[Tensor]()

    def take(self, text: Text) -> None:
        """Replay a text."""
        self._steps.append(torch.stack([run.steps(text) for run in self._runs]))
        self._firsts.append(self._survey.firsts(text, self._heads))

    @property
    def counts(self) -> Counts:
        """The counts of all texts so far."""
        return Counts(self._kinds, torch.stack(self._steps), torch.stack(self._firsts))


def measure(
    model: MedusaModel, names: Sequence[str], sizes: Sequence[int], prompts: Sequence[list[int]],
    answers: Sequence[list[int]], full: bool = False,
) -> Measured:  # fmt: skip
    """Replay all texts with all drafters; see ``Runs``.

    Args:
        model: The base and its drafters.
        names: Names of drafters.
        sizes: Nodes with the root, each at least 2.
        prompts: Token ids of Q prompts.
        answers: The base's answers.
        full: See ``Run``.

    Raises:
        ValueError: A drafter is not available.
    """
    base, own, pool = model.base, 0, model.base.new_pool()
    drafters = {name: Runs(model, name, sizes, full or model.graphs is not None) for name in names}
    with Progress(len(prompts) * len(names)) as progress:
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
            text = read(base, pool, prompt, answer)
            own += text.own(base)
            for name, runs in drafters.items():
                progress.stage(f"text {number} of {len(prompts)}: {name}")
                runs.take(text)
                progress.update()
    return Measured({name: runs.counts for name, runs in drafters.items()}, own)


def stretches() -> list[str]:
    """Names of the stretches of an answer."""
    return [f"{first} to {after - 1}" for first, after in pairwise(STRETCHES)] + [f"{STRETCHES[-1]} on"]
