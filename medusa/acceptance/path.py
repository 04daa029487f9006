"""What every rule says, and what follows from it: the accepted path of a tree.

Legend: B batch, N tree nodes, V vocabulary, A longest path (depth of the draft + 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.cpu import native, selection
from medusa.state import DecodeState
from medusa.tree import Draft


@dataclass(frozen=True)
class Verdict:
    """What a rule says of every node.

    Attributes:
        edges: [B, N] bool, the node's token is allowed after its parent; the root's entry is not read. None where that
            is the parent's bonus token and no other.
        bonus: [B, N] int64, the base's own next token after each node.
        likelihood: [B, N] float32 log-probability of each node's token after its parent, for rules that allow several
            children of one node; None where at most one can be right.
    """

    edges: Tensor | None
    bonus: Tensor
    likelihood: Tensor | None = None

    def allowed(self, draft: Draft) -> Tensor:
        """[B, N] bool, the edges of this draft, which the verdict is on; none to what fills up smaller trees."""
        edges_BN = draft.tokens == self.bonus.gather(1, draft.parents) if self.edges is None else self.edges
        return edges_BN if draft.real is None else edges_BN & draft.real


Rule = Callable[[Draft, Tensor, DecodeState], Verdict]
"""(draft, base logits [B, N, V] over it, the state that it was drafted from) -> verdict. A pure function."""


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each sequence.

    Attributes:
        path: [B, A] node indices from the root on; beyond the path's end entry i is i.
        emitted: [A + 1, B] the tokens that the step emits, accepted draft tokens and then the bonus token, undefined
            beyond their number. That is the last row: nodes on the path with the root, 0 where a sequence may not grow.
        bonus: [B] the base's own token after the path.
        hidden: [B, F] the base's hidden state at the path's last node.
    """

    path: Tensor
    emitted: Tensor
    bonus: Tensor
    hidden: Tensor

    @property
    def counts(self) -> Tensor:
        """[B] how many tokens are emitted."""
        return self.emitted[-1]

    def along_path(self, rows_BNF: Tensor) -> Tensor:
        """[B, A, F] of what nodes have, that of the path's; beyond ``counts`` anything."""
        return rows_BNF.gather(1, self.path[..., None].expand(-1, -1, rows_BNF.shape[2]))

    @property
    def tokens(self) -> Tensor:
        """[B, A] the emitted tokens; beyond ``counts`` undefined."""
        return self.emitted[:-1].T


class Path(NamedTuple):
    """The path of each sequence that a verdict accepts, growing or not.

    Attributes:
        path: See ``Accepted``.
        counts: [B] nodes on the path with the root.
        tokens: [B, A] accepted draft tokens, then the bonus token; beyond ``counts`` undefined.
        leaf: [B] index of the path's last node.
        bonus: See ``Accepted``.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor
    leaf: Tensor
    bonus: Tensor


def accept(draft: Draft, verdict: Verdict, state: DecodeState, hidden_BNF: Tensor) -> Accepted:
    """Accept the path of each tree, and write what it emits behind the root into the state's history.

    Args:
        draft: What was verified.
        verdict: What a rule says of it.
        state: What it was drafted from.
        hidden_BNF: The base's hidden states at its nodes.
    """
    if native.reads_indices(draft.tokens, draft.parents, state.history):
        edges_BN = verdict.edges if draft.sizes is None else verdict.allowed(draft)
        return Accepted(
            *selection.accept(
                draft.tokens, draft.parents, draft.depth + 1, edges_BN, verdict.bonus, verdict.likelihood, state.active,
                state.positions, state.history, hidden_BNF,
            )
        )  # fmt: skip
    path_BA, counts_B, tokens_BA, leaf_B, bonus_B = select_path(draft, verdict)
    new_A = torch.arange(1, path_BA.shape[1] + 1, device=path_BA.device)
    state.history.scatter_(1, state.positions[:, None] + new_A, tokens_BA)
    emitted = torch.cat([tokens_BA.T, torch.where(state.active, counts_B, 0)[None]])
    index_B = torch.arange(len(leaf_B), device=leaf_B.device)
    return Accepted(path_BA, emitted, bonus_B, hidden_BNF[index_B, leaf_B])


def select_path(draft: Draft, verdict: Verdict) -> Path:
    """Take the deepest node whose edges are all accepted; among equally deep ones the most likely path."""
    if draft.depth == 0:  # plain decoding does not pay for trees
        zero_B1 = torch.zeros_like(draft.tokens)
        bonus_B = verdict.bonus[:, 0]
        return Path(zero_B1, torch.ones_like(bonus_B), verdict.bonus, zero_B1[:, 0], bonus_B)
    edges_BN = verdict.allowed(draft) | (draft.depths == 0)
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
    return Path(path_BA, counts_B, tokens_BA, leaf_B1[:, 0], bonus_B1[:, 0])
