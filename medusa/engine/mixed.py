"""Requests of a batch with drafters and rules of their own: each group drafts and judges apart, all share one pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.acceptance import Rule, Verdict
from medusa.cache import Cached
from medusa.drafters import Drafter
from medusa.engine.constraint import ConstrainedRule
from medusa.engine.logprobs import LogprobReader
from medusa.engine.request import Request
from medusa.state import DecodeState
from medusa.tree import Draft


class Composed(NamedTuple):
    """What steps of some requests are made of, see ``decode_step``.

    Attributes:
        drafter: Of all.
        rule: Of all.
        reader: Where one of them asks for log-probabilities.
        chosen: The drafter of each.
        watched: The host has a say in each step.
    """

    drafter: Drafter
    rule: Rule
    reader: LogprobReader | None
    chosen: dict[Request, Drafter]
    watched: bool


class Group(NamedTuple):
    """Requests that share a drafter and a rule, by their places."""

    rows: list[int]
    drafter: Drafter
    rule: Rule


def compose(requests: Sequence[Request], choose: Callable[[Request], Drafter], device: torch.device) -> Composed:
    """One drafter and one rule for all of these requests, which share theirs where they are alike."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, request in enumerate(requests):
        alike.setdefault((request.rule, *request.drafting), []).append(index)
    groups = [Group(same, choose(requests[same[0]]), requests[same[0]].rule) for same in alike.values()]
    drafter = groups[0].drafter if len(groups) == 1 else MixedDrafter(groups, device)
    rule: Rule = groups[0].rule if len(groups) == 1 else MixedRule(groups)
    constraints = {index: one.constraint for index, one in enumerate(requests) if one.constraint is not None}
    if constraints:
        rule = ConstrainedRule(rule, constraints)
    wanted = [request.params.logprobs for request in requests]
    reader = LogprobReader(wanted) if any(most is not None for most in wanted) else None
    chosen = {requests[index]: group.drafter for group in groups for index in group.rows}
    return Composed(drafter, rule, reader, chosen, watched=reader is not None or bool(constraints))


class MixedDrafter(Drafter):
    """Each group's drafter for its requests; smaller trees are filled up. A graph would be of this mix alone."""

    recordable = False

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._parts = [(torch.tensor(group.rows, device=device), group) for group in groups]
        self.nodes = max(group.drafter.nodes for group in groups)

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """One draft below ``state.roots``, with the groups' own as its parts."""
        assert not isinstance(cached, Mapping), "steps of a mix are never recorded"
        drafts = []
        for rows, group in self._parts:
            own = [cached[row] for row in group.rows] if cached else ()
            drafts.append((rows, group.drafter.propose(state.select(rows), own)))
        return Draft.stack(drafts)

    def beside_prompts(self) -> Drafter:
        """Each group's own choice."""
        return MixedDrafter(
            [group._replace(drafter=group.drafter.beside_prompts()) for group in self._groups], self._device
        )

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """Each drafter sees its own requests, and the time of all."""
        for group in self._groups:
            group.drafter.observe([counts[row] for row in group.rows], seconds)


class MixedRule:
    """Each group's rule for its part of the draft."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    def __call__(self, draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        """See ``Rule``. Where one child at most can be right, all paths are equally likely."""
        edges_BN, bonus_BN = torch.zeros_like(draft.tokens, dtype=torch.bool), torch.zeros_like(draft.tokens)
        likelihood_BN = torch.zeros(draft.tokens.shape, device=draft.tokens.device)
        for group, (rows, part) in zip(self._groups, draft.parts, strict=True):
            size = part.tokens.shape[1]
            verdict = group.rule(part, logits_BNV[rows][:, :size], state.select(rows))
            edges_BN[rows, :size], bonus_BN[rows, :size] = verdict.allowed(part), verdict.bonus
            if verdict.likelihood is not None:
                likelihood_BN[rows, :size] = verdict.likelihood.float()
        return Verdict(edges_BN, bonus_BN, likelihood_BN)
