"""The verdict of an acceptance rule, and the accepted path that follows from it.

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
    """The result of a rule for every node.

    Attributes:
        edges: [B, N] bool, whether the node's token is allowed after its parent; the root's entry is not read. None = a
            token is allowed if it is the parent's bonus token.
        bonus: [B, N] int64, the base's own next token after each node.
        likelihood: [B, N] float32 log-probability of each node's token after its parent, for rules that allow several
            children of one node; None for rules that allow one at most.
    """

    edges: Tensor | None
    bonus: Tensor
    likelihood: Tensor | None = None

    def allowed(self, draft: Draft) -> Tensor:
        """[B, N] bool, the allowed edges of the draft of this verdict; false for padding of smaller trees."""
        edges_BN = draft.tokens == self.bonus.gather(1, draft.parents) if self.edges is None else self.edges
        return edges_BN if draft.real is None else edges_BN & draft.real


Rule = Callable[[Draft, Tensor, DecodeState], Verdict]
"""(draft, base logits [B, N, V] over it, the state that it was drafted from) -> verdict. A pure function."""


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each sequence.

    Attributes:
        path: [B, A] node indices from the root on; beyond the path's end entry i is i.
        emitted: [A + 1, B] the emitted tokens: accepted draft tokens, then the bonus token; undefined beyond their
            number. The last row is that number (nodes on the path with the root), 0 if a sequence may not grow.
        bonus: [B] the base's own token after the path.
        hidden: [B, F] the base's hidden state at the path's last node.
    """

    path: Tensor
    emitted: Tensor
    bonus: Tensor
    hidden: Tensor

    @property
    def counts(self) -> Tensor:
        """[B] number of emitted tokens."""
        return self.emitted[-1]

    def along_path(self, rows_BNF: Tensor) -> Tensor:
        """Values [B, A, F] of the path's nodes, out of those of all nodes; undefined beyond ``counts``."""
        return rows_BNF.gather(1, self.path[..., None].expand(-1, -1, rows_BNF.shape[2]))

    @property
    def tokens(self) -> Tensor:
        """[B, A] the emitted tokens; beyond ``counts`` undefined."""
        return self.emitted[:-1].T


class Path(NamedTuple):
    """The accepted path of each sequence, active or not.

    Attributes:
        path: See ``Accepted``.
        counts: [B] number of nodes on the path with the root.
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
    """Accept the path of each tree, and append the emitted tokens to the state's history.

    Args:
        draft: The verified draft.
        verdict: A rule's verdict on it.
        state: The state from which it was drafted.
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
    if draft.depth == 0:  # no tree search in plain decoding
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
