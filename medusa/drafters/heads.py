"""Drafting with trained heads: a static tree, or the N best nodes of each step."""

from collections.abc import Callable

import torch
from torch import Tensor

from medusa.drafters.base import DecodeState
from medusa.heads import DraftHeads
from medusa.heads.base import LmHead
from medusa.tree import Draft, Tree

SUPER_TREE_FACTOR = 8
SUPER_TREE_WIDTH = 10
LOWEST = -40.0


class HeadsDrafter:
    """Fills a tree with the heads' best tokens.

    With ``tree`` every step has that topology. Otherwise each step chooses the ``nodes`` best nodes of a larger fixed
    super-tree: the score of a node is the sum of the heads' log-probabilities along its path, so a parent never scores
    below its child and the best nodes form a tree by themselves. Shapes are fixed; nothing waits for the device.

    Args:
        heads: The trained heads.
        lm_head: The base's output layer, for heads that share it.
        embed: The base's input embeddings, token ids [...] to [..., D].
        nodes: N for dynamic trees, the root included.
        tree: A static topology instead.

    Raises:
        ValueError: The tree is deeper than there are heads, or the budget is not positive.
    """

    def __init__(
        self,
        heads: DraftHeads,
        lm_head: LmHead,
        embed: Callable[[Tensor], Tensor],
        nodes: int,
        tree: Tree | None = None,
    ) -> None:
        depth = heads.config.num_heads
        if tree is not None and tree.depth > depth:
            raise ValueError(
                f"tree depth ({tree.depth}) exceeds the number of heads ({depth}); prune the tree or train more heads"
            )
        if tree is not None and tree.width > heads.config.vocab_size:
            raise ValueError(f"tree width ({tree.width}) exceeds the vocabulary ({heads.config.vocab_size}); prune it")
        if nodes < 1:
            raise ValueError(f"nodes ({nodes}) must be at least 1 (1 = plain decoding); give a larger tree budget")
        self.heads, self.lm_head, self.embed, self.tree = heads, lm_head, embed, tree
        width = min(SUPER_TREE_WIDTH, heads.config.vocab_size)
        self.topology = tree or Tree.ranked(depth, SUPER_TREE_FACTOR * nodes + 1, width)
        self.nodes = tree.nodes if tree else min(nodes, self.topology.nodes)
        device = next(heads.parameters()).device
        super_tree = self.topology
        self._parents = super_tree.parents.to(device)
        self._depths = super_tree.depths.to(device)
        self._ancestors = super_tree.ancestors.to(device)
        # Entry of the flattened [K, width] table of the heads' best tokens that each draft node takes.
        self._entries = ((super_tree.depths - 1) * super_tree.width + super_tree.ranks)[1:].to(device)
        # Sums log-probabilities along paths; the small cost per edge keeps parents ahead where a probability is 1.
        self._path_sum = self._ancestors[1:, 1:].T.float()
        self._edge_cost = 1e-4 * self._depths[1:].float()

    def propose(self, state: DecodeState) -> Draft:
        """A draft below ``state.roots`` from the hidden state that predicted them."""
        roots_B1 = state.roots[:, None]
        if self.nodes == 1:
            return Draft.chain(roots_B1)
        logits_BKV = self.heads.logits(state.hidden, self.embed(state.roots), self.lm_head).transpose(0, 1)
        best_BKW = logits_BKV[:, : self.topology.depth].topk(self.topology.width, dim=-1)
        tokens_BM = torch.cat([roots_B1, best_BKW.indices.flatten(1)[:, self._entries]], dim=1)
        if self.tree is not None:
            return self._whole_tree(tokens_BM)
        logprobs_BKW = best_BKW.values.float() - logits_BKV.float().logsumexp(-1, keepdim=True)
        # Bounded, so that heads that overflow (NaN, -inf) still give trees and the edge cost is never rounded away.
        logprobs_BKW = logprobs_BKW.nan_to_num(nan=LOWEST).clamp(min=LOWEST, max=0.0)
        return self._best_nodes(tokens_BM, logprobs_BKW.flatten(1)[:, self._entries])

    def _whole_tree(self, tokens_BM: Tensor) -> Draft:
        batch = len(tokens_BM)
        return Draft(
            tokens=tokens_BM,
            parents=self._parents.expand(batch, -1),
            depths=self._depths.expand(batch, -1),
            ancestors=self._ancestors.expand(batch, -1, -1),
            depth=self.topology.depth,
        )

    def _best_nodes(self, tokens_BM: Tensor, logprobs_BM: Tensor) -> Draft:
        """The N best of the super-tree's M nodes, in its order, as a draft."""
        score_BM = logprobs_BM @ self._path_sum - self._edge_cost
        chosen_BN = score_BM.topk(self.nodes - 1, dim=-1).indices.sort(-1).values + 1
        chosen_BN = torch.nn.functional.pad(chosen_BN, (1, 0))
        nodes = torch.arange(self.nodes, device=chosen_BN.device).expand_as(chosen_BN)
        new_index_BM = torch.zeros_like(tokens_BM).scatter_(1, chosen_BN, nodes)
        return Draft(
            tokens=tokens_BM.gather(1, chosen_BN),
            parents=new_index_BM.gather(1, self._parents[chosen_BN]),
            depths=self._depths[chosen_BN],
            ancestors=self._ancestors[chosen_BN[:, :, None], chosen_BN[:, None, :]],
            depth=min(self.topology.depth, self.nodes - 1),
        )
