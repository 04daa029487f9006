"""Constraints on completions: a grammar, a JSON schema.

Legend: B batch, N tree nodes, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from medusa.acceptance import Rule, Verdict
from medusa.state import DecodeState
from medusa.tree import Draft


class Constraint(Protocol):
    """The tokens that one completion may have next, given its text so far."""

    def forbid(self, tokens: Sequence[int], parents: Sequence[int], logits_NV: Tensor) -> None:
        """Set the logits of forbidden next tokens to -inf at each node of a tree; forbidden nodes are not read later.

        Args:
            tokens: Tokens of the N nodes; node 0 is the root, which ``advance`` has seen.
            parents: The parent of each node, which comes before it; 0 for the root.
            logits_NV: The base's logits after each node; changed in place.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """The completion has grown by these tokens."""


class ConstrainedRule:
    """Applies a rule to constrained logits, so the tokens are those of plain decoding with the same constraints.

    Args:
        rule: The rule of all rows.
        constraints: Constraints by row; other rows have none.
    """

    def __init__(self, rule: Rule, constraints: Mapping[int, Constraint]) -> None:
        self._rule, self._constraints = rule, constraints

    def __call__(self, draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        """See ``Rule``; the logits passed in are not changed."""
        logits_BNV = logits_BNV.clone()
        for row, constraint in self._constraints.items():
            if state.active[row]:
                size = draft.row_sizes[row]
                tokens, parents = draft.tokens[row, :size].tolist(), draft.parents[row, :size].tolist()
                constraint.forbid(tokens, parents, logits_BNV[row, :size])
        return self._rule(draft, logits_BNV, state)
