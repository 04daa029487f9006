"""Acceptance: which drafted tokens the base agrees with.

Every rule maps the base's logits at all tree nodes to an edge mask [B, N] (whether a node's token is allowed after its
parent) and one bonus token per node (the base's own next token there). The rest is shared: the accepted path ends in
the deepest node all of whose edges are accepted.
"""

from medusa.acceptance.build import BuiltRule, build_rule
from medusa.acceptance.path import Accepted, Rule, Verdict, accept, select_path
from medusa.acceptance.rules import greedy

__all__ = [
    "Accepted",
    "BuiltRule",
    "Rule",
    "Verdict",
    "accept",
    "build_rule",
    "greedy",
    "select_path",
]
