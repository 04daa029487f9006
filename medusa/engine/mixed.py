"""A batch with several drafters and rules: each group of requests has its own, and all groups share one pass."""

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
    """The arguments of ``decode_step`` for a set of requests.

    Attributes:
        drafter: The drafter for all requests.
        rule: The rule for all requests.
        reader: Reads log-probabilities; None = no request asks for them.
        chosen: The drafter of each request.
        watched: Whether the host takes part in each step, for a grammar or log-probabilities.
    """

    drafter: Drafter
    rule: Rule
    reader: LogprobReader | None
    chosen: dict[Request, Drafter]
    watched: bool


class Group(NamedTuple):
    """Requests (by their places in the batch) that share a drafter and a rule."""

    rows: list[int]
    drafter: Drafter
    rule: Rule


def compose(requests: Sequence[Request], choose: Callable[[Request], Drafter], device: torch.device) -> Composed:
    """One drafter and one rule for all of these requests; requests with equal parameters share theirs."""
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
    """Drafts with each group's drafter and pads smaller trees. Not recorded: a graph would fit this mix only."""

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._parts = [(torch.tensor(group.rows, device=device), group) for group in groups]
        self.nodes = max(group.drafter.nodes for group in groups)

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """One draft below ``state.roots``, with the groups' drafts as its parts."""
        assert not isinstance(cached, Mapping), "steps of a mix are never recorded"
        drafts = []
        for rows, group in self._parts:
            own = [cached[row] for row in group.rows] if cached else ()
            drafts.append((rows, group.drafter.propose(state.select(rows), own)))
        return Draft.stack(drafts)

    def beside_prompts(self) -> Drafter:
        """See ``Drafter``; each group chooses for itself."""
        return MixedDrafter(
            [group._replace(drafter=group.drafter.beside_prompts()) for group in self._groups], self._device
        )

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """Pass each drafter the counts of its own requests, and the time of the whole step."""
        for group in self._groups:
            group.drafter.observe([counts[row] for row in group.rows], seconds)


class MixedRule:
    """Applies each group's rule to its part of the draft."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    def __call__(self, draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        """See ``Rule``. Rules without likelihoods allow one child at most, so their likelihoods stay 0."""
        edges_BN, bonus_BN = torch.zeros_like(draft.tokens, dtype=torch.bool), torch.zeros_like(draft.tokens)
        likelihood_BN = torch.zeros(draft.tokens.shape, dtype=torch.float32, device=draft.tokens.device)
        for group, (rows, part) in zip(self._groups, draft.parts, strict=True):
            size = part.tokens.shape[1]
            verdict = group.rule(part, logits_BNV[rows][:, :size], state.select(rows))
            edges_BN[rows, :size], bonus_BN[rows, :size] = verdict.allowed(part), verdict.bonus
            if verdict.likelihood is not None:
                likelihood_BN[rows, :size] = verdict.likelihood.float()
        return Verdict(edges_BN, bonus_BN, likelihood_BN)
