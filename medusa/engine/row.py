"""One request of a batch, and what rows of a batch draft and are judged with together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from medusa.acceptance import BuiltRule, Rule
from medusa.drafters import Drafter
from medusa.engine.constraint import ConstrainedRule, Constraint
from medusa.engine.logprobs import LogprobReader
from medusa.engine.mixed import Group, MixedDrafter, MixedRule
from medusa.engine.output import Completion
from medusa.sampling import SamplingParams, Speculation

TREES = 128
"""Rows behind a text that are kept free for trees."""


@dataclass(frozen=True, eq=False)
class Row:
    """One request: what it asks for, what it may say, and its completion."""

    prompt: list[int]
    params: SamplingParams
    speculation: Speculation
    rule: BuiltRule
    completion: Completion
    constraint: Constraint | None

    @property
    def drafting(self) -> tuple[object, ...]:
        """What rows with one drafter have in common."""
        wanted = self.speculation
        name = wanted.drafter if isinstance(wanted.drafter, str) else id(wanted.drafter)
        return wanted.heads, name, wanted.nodes, wanted.tree

    @property
    def most_rows(self) -> int:
        """Of the KV cache, see ``most_rows``."""
        return most_rows(len(self.prompt), self.completion.max_new_tokens, self.speculation.nodes)


def most_rows(prompt: int, new: int, nodes: int | None) -> int:
    """Rows of the cache that a request may come to, the trees behind its text included.

    Args:
        prompt: Its tokens.
        new: Tokens of its completion, at most.
        nodes: Of its trees, where it says so.
    """
    return prompt + new + max(TREES, 2 * (nodes or 0))


class Parts(NamedTuple):
    """What steps of some rows are made of; see ``decode_step``."""

    drafter: Drafter
    rule: Rule
    reader: LogprobReader | None
    chosen: dict[Row, Drafter]
    """The drafter of each."""


def compose(rows: Sequence[Row], choose: Callable[[Row], Drafter], device: torch.device) -> Parts:
    """One drafter and one rule for all of these rows, which share theirs where they are alike."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault((row.rule, *row.drafting), []).append(index)
    groups = [Group(same, choose(rows[same[0]]), rows[same[0]].rule) for same in alike.values()]
    drafter = groups[0].drafter if len(groups) == 1 else MixedDrafter(groups, device)
    rule: Rule = groups[0].rule if len(groups) == 1 else MixedRule(groups)
    constraints = {index: row.constraint for index, row in enumerate(rows) if row.constraint is not None}
    if constraints:
        rule = ConstrainedRule(rule, constraints)
    reader = None
    if any(row.params.logprobs is not None for row in rows):
        reader = LogprobReader([row.params.logprobs for row in rows])
    return Parts(drafter, rule, reader, {rows[index]: group.drafter for group in groups for index in group.rows})
