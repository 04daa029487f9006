"""``medusa-bench tree``: the best static tree of every size for trained heads, beside dynamic trees of the same size.

A static tree is grown from how often each head's r-th best token is right, on average; a dynamic tree is grown in every
step from what the heads say there. Both are filled by the same heads and verify equally many nodes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from medusa import Calibration, MedusaModel, Tree
from medusa.budget.tree_search import GrownTree, grow_tree
from medusa.drafters import Drafter, HeadsDrafter

BATCH = 8
"""Prompts that are answered together; what a step emits does not depend on it."""


def measure_trees(
    model: MedusaModel,
    calibration: Calibration,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sizes: Iterable[int],
) -> list[dict[str, Any]]:
    """Answer prompts greedily with the best static tree and with dynamic trees of every size.

    Args:
        model: A base with heads, and one that verifies trees.
        calibration: Of these heads; from other text than the answers, or the prediction knows what it predicts.
        prompts: Token ids.
        max_new_tokens: Limit per answer.
        sizes: Tree sizes N with the root.

    Returns:
        For every size its tokens per step over whole answers: as predicted from the calibration, and as measured.
    """
    rows = []
    for nodes in sizes:
        assert model.heads is not None, "checked by the caller"
        grown = grow_tree(calibration.accuracies, nodes)
        dynamic = HeadsDrafter(model.heads, model.base, nodes, host_decides=False)
        static_tokens = tokens_per_step(model, prompts, max_new_tokens, tree=grown.tree)
        dynamic_tokens = tokens_per_step(model, prompts, max_new_tokens, drafter=dynamic)
        rows.append({
            "nodes": nodes,
            "static_nodes": grown.tree.nodes,
            "dynamic_nodes": dynamic.nodes,
            "depth": grown.tree.depth,
            "predicted": round(grown.tokens_per_step, 4),
            "static": round(static_tokens, 4),
            "dynamic": round(dynamic_tokens, 4),
            "dynamic_over_static": round(dynamic_tokens / static_tokens, 4),
        })  # fmt: skip
    return rows


def tokens_per_step(
    model: MedusaModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    tree: Tree | None = None,
    drafter: Drafter | None = None,
) -> float:
    """Tokens per verify pass over whole greedy answers, with a tree or a drafter."""
    tokens = steps = 0
    for first in range(0, len(prompts), BATCH):
        part = list(prompts[first : first + BATCH])
        for output in model.generate(part, max_new_tokens=max_new_tokens, tree=tree, drafter=drafter):
            tokens, steps = tokens + len(output.tokens), steps + output.steps
    return tokens / steps


def describe_tree(grown: GrownTree, calibration: Calibration) -> dict[str, Any]:
    """What a tree file says beside the tree: what is expected of it, and what it was grown from."""
    return {
        "tokens_per_step": round(grown.tokens_per_step, 4),
        "survivals": [round(survival, 6) for survival in grown.survivals],
        "calibration": {
            "samples": calibration.samples,
            "top1": [round(share, 4) for share in calibration.top(1)],
            "provenance": calibration.provenance,
        },
    }
