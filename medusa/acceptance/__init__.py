"""Acceptance: which drafted tokens the base agrees with.

Every rule has one shape: from the base's logits over all tree nodes to an edge mask [B, N] (the token of a node is
allowed after its parent) and one bonus token per node (the base's own next token there). What follows is shared:
the accepted path is the deepest node all of whose edges are accepted.
"""

from medusa.acceptance.build import BuiltRule, build_rule
from medusa.acceptance.path import Accepted, Rule, Verdict, accept, select_path
from medusa.acceptance.rules import greedy, sampling, speculative, typical

__all__ = [
    "Accepted",
    "BuiltRule",
    "Rule",
    "Verdict",
    "accept",
    "build_rule",
    "greedy",
    "sampling",
    "select_path",
    "speculative",
    "typical",
]
