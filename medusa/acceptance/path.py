"""What every rule says, and what follows from it: the accepted path of a tree.

Legend: B batch, N tree nodes, V vocabulary, A longest path (depth of the draft + 1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.cpu import native, selection
from medusa.state import DecodeState
from medusa.tree import Draft


@dataclass(frozen=True)
class Verdict:
    """What a rule says of every node.

    Attributes:
        edges: [B, N] bool, the node's token is allowed after its parent; the root's entry is not read.
        bonus: [B, N] int64, the base's own next token after each node.
        likelihood: [B, N] float32 log-probability of each node's token after its parent, for rules that allow several
            children of one node; None where at most one can be right.
    """

    edges: Tensor
    bonus: Tensor
    likelihood: Tensor | None = None


Rule = Callable[[Draft, Tensor, DecodeState], Verdict]
"""(draft, base logits [B, N, V] over it, the state that it was drafted from) -> verdict. A pure function."""


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each sequence.

    Attributes:
        path: [B, A] node indices from the root on; beyond the path's end entry i is i.
        counts: [B] nodes on the path with the root, which is also the number of tokens that the step emits.
        tokens: [B, A] the emitted tokens: accepted draft tokens, then the bonus token; beyond ``counts`` undefined.
        leaf: [B] index of the path's last node.
        bonus: [B] the base's own token after the path.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor
    leaf: Tensor
    bonus: Tensor


def select_path(draft: Draft, verdict: Verdict) -> Accepted:
    """Take the deepest node whose edges are all accepted; among equally deep ones the most likely path."""
    if draft.depth == 0:  # plain decoding does not pay for trees
        zero_B1 = torch.zeros_like(draft.tokens)
        bonus_B = verdict.bonus[:, 0]
        return Accepted(zero_B1, torch.ones_like(bonus_B), verdict.bonus, zero_B1[:, 0], bonus_B)
    edges_BN = verdict.edges if draft.real is None else verdict.edges & draft.real
    if native.reads_indices(draft.tokens, draft.parents):
        found = selection.select_path(draft.tokens, draft.parents, edges_BN, verdict.bonus, verdict.likelihood)
        path_BN, counts_B, tokens_BN, leaf_B, bonus_B = found
        return Accepted(path_BN[:, : draft.depth + 1], counts_B, tokens_BN[:, : draft.depth + 1], leaf_B, bonus_B)
    edges_BN = edges_BN | (draft.depths == 0)
    accepted_BN = (edges_BN[:, None] | ~draft.ancestors).all(-1)
    score_BN = torch.where(accepted_BN, draft.depths, -1).float()
    if verdict.likelihood is not None:
        inner_BN = torch.where(draft.depths == 0, 0.0, verdict.likelihood)
        path_BN = torch.where(draft.ancestors, inner_BN[:, None], 0.0).sum(-1)
        score_BN = score_BN + 0.5 * path_BN.exp()
    leaf_B1 = score_BN.argmax(-1, keepdim=True)
    counts_B = draft.depths.gather(1, leaf_B1)[:, 0] + 1
    bonus_B1 = verdict.bonus.gather(1, leaf_B1)

    batch, nodes = draft.tokens.shape
    index_N = torch.arange(nodes, device=draft.tokens.device)
    on_path_BN = draft.ancestors.gather(1, leaf_B1[:, :, None].expand(-1, 1, nodes))[:, 0]
    column_BN = torch.where(on_path_BN, draft.depths, draft.depth + 1)
    path_BA = torch.arange(draft.depth + 2, device=index_N.device).repeat(batch, 1)
    path_BA = path_BA.scatter_(1, column_BN, index_N.expand(batch, -1))[:, :-1]

    tokens_BA = draft.tokens.gather(1, path_BA).roll(-1, dims=1)
    tokens_BA = tokens_BA.scatter(1, counts_B[:, None] - 1, bonus_B1)
    return Accepted(path_BA, counts_B, tokens_BA, leaf_B1[:, 0], bonus_B1[:, 0])
