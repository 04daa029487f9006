"""Rows of one batch with drafters and rules of their own: each group drafts and judges apart, all share one pass."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.acceptance import Rule, Verdict
from medusa.cache import SlotCache
from medusa.drafters import Drafter
from medusa.state import DecodeState
from medusa.tree import Draft


class Group(NamedTuple):
    """Rows that share a drafter and a rule."""

    rows: list[int]
    drafter: Drafter
    rule: Rule


class MixedDrafter(Drafter):
    """Each group's drafter for its rows; smaller trees are filled up. A graph would be of this mix of rows alone."""

    recordable = False

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._parts = [(torch.tensor(group.rows, device=device), group.drafter) for group in groups]
        self.nodes = max(group.drafter.nodes for group in groups)

    def propose(self, state: DecodeState, cache: SlotCache | None = None, /) -> Draft:
        """One draft below ``state.roots``, with the groups' own as its parts."""
        return Draft.stack([(rows, _propose(drafter, rows, state, cache)) for rows, drafter in self._parts])

    def beside_prompts(self) -> Drafter:
        """Each group's own choice."""
        return MixedDrafter(
            [group._replace(drafter=group.drafter.beside_prompts()) for group in self._groups], self._device
        )

    def observe(self, counts: Sequence[int], seconds: float) -> None:
        """Each drafter sees its own rows, and the time of all."""
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


def _propose(drafter: Drafter, rows: Tensor, state: DecodeState, cache: SlotCache | None) -> Draft:
    """A drafter's draft for its rows [b]."""
    if not drafter.follows:
        return drafter.propose(state.select(rows))
    own_B = torch.zeros_like(state.active).index_fill_(0, rows, True)
    return drafter.propose(dataclasses.replace(state, active=state.active & own_B), cache).select(rows)
