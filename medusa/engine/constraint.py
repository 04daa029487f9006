"""Completions that may say some things only: a grammar, a JSON schema.

Legend: B batch, N tree nodes, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from medusa.acceptance import Rule, Verdict
from medusa.state import DecodeState
from medusa.tree import Draft


class Constraint(Protocol):
    """What one completion may say, as far as it has come."""

    def forbid(self, tokens: Sequence[int], parents: Sequence[int], logits_NV: Tensor) -> None:
        """Set to -inf what may not follow each node of a tree; what stands at nodes that may not be there is not read.

        Args:
            tokens: Of the N nodes; node 0 is the root, which ``advance`` has seen.
            parents: Of each node, before it; 0 for the root.
            logits_NV: Changed in place.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """The completion has grown by these tokens."""


class ConstrainedRule:
    """A rule that sees what constraints leave of the logits, so the tokens are those of plain decoding under them.

    Args:
        rule: Of all rows.
        constraints: By row; the others are free.
    """

    def __init__(self, rule: Rule, constraints: Mapping[int, Constraint]) -> None:
        self._rule, self._constraints = rule, constraints

    def __call__(self, draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        """See ``Rule``; the logits stay as they are."""
        logits_BNV = logits_BNV.clone()
        for row, constraint in self._constraints.items():
            if state.active[row]:
                size = draft.row_sizes[row]
                tokens, parents = draft.tokens[row, :size].tolist(), draft.parents[row, :size].tolist()
                constraint.forbid(tokens, parents, logits_BNV[row, :size])
        return self._rule(draft, logits_BNV, state)
