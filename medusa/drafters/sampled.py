"""Sampled drafts: tokens are drawn from the heads' distributions, which the ``speculative`` rule needs.

Legend: B batch, N tree nodes, m nodes that get children, C children of a level, W draws per node, M draws of a level,
V columns of the draft logits.
"""

import torch
from torch import Tensor

from medusa.cache import Cached
from medusa.drafters.base import Drafter
from medusa.drafters.heads import LOWEST, WIDTH, StaticShape, check_tree
from medusa.heads import DraftHeads, Vocabulary
from medusa.noise import DRAFT, gumbel_noise
from medusa.state import DecodeState
from medusa.tree import Draft, Tree


def coin_tree(nodes: int, depth: int, width: int = WIDTH) -> Tree:
    """The most likely nodes if every draw is accepted with probability 1/2 after earlier draws were rejected.

    Then one more level costs as much as one more sibling: the path r_1 .. r_d has probability 2^-(d + r_1 + .. + r_d).

    Args:
        nodes: N, the root included, at least 2; fewer if depth and width allow no more.
        depth: Longest path, at least 1.
        width: Most children of a node, at least 1.
    """
    paths: list[tuple[int, ...]] = [(0,)]
    for path in paths:  # breadth first: the list grows during the loop
        if len(paths) >= nodes - 1:
            break
        if len(path) < depth:
            paths.append((*path, 0))
        if path[-1] + 1 < width:
            paths.append((*path[:-1], path[-1] + 1))
    return Tree(tuple(paths[: nodes - 1]))


class SampledHeadsDrafter(Drafter):
    """Fills a static tree with draws from the heads; rank r of a path is the r-th draw below its parent.

    Siblings are drawn without replacement: these are the best tokens after Gumbel noise, in order. The noise is keyed
    by (seed, position), separate from all other noise. The topology is static: if it depended on the draws, the
    reported distributions would be wrong.

    Source: Jeon et al. 2024 (Recursive Speculative Decoding), section 3.

    Args:
        heads: The trained heads.
        vocabulary: The base's embeddings and output layer.
        nodes: N, the root included, at least 2.
        temperature: Temperature of the draws, above 0.
        tree: The topology; None = ``coin_tree`` of ``nodes`` nodes.

    Raises:
        ValueError: The tree does not fit the heads, or the temperature is not positive.
    """

    def __init__(
        self,
        heads: DraftHeads,
        vocabulary: Vocabulary,
        nodes: int,
        temperature: float,
        tree: Tree | None = None,
    ) -> None:
        config = heads.config
        tree = tree or coin_tree(nodes, config.num_heads, min(WIDTH, config.output_size))
        check_tree(tree, config)
        if not temperature > 0:
            raise ValueError(f"temperature ({temperature}) must be above 0 to draw drafts; raise it, or draft the best")
        self.recordable = True
        self.observers, self.sees_base = heads.observers, heads.sees_base
        self.heads, self.vocabulary, self.tree = heads, vocabulary, tree
        self.temperature, self.nodes = temperature, tree.nodes
        device = next(heads.parameters()).device
        self._shape = StaticShape(tree, device)
        self.places = max(config.block_rows, sum(self._shape.growth().parents)) if heads.remembers else 0
        self._parents_N = tree.parents.to(device)

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A draft below ``state.roots`` with the distribution from which every token was drawn."""
        batch, width, output_size = len(state.roots), self.tree.width, self.heads.config.output_size
        ahead_K = torch.arange(1, self.tree.depth + 1, device=state.roots.device)
        noise_BKV = gumbel_noise(state.seeds, state.positions[:, None] + ahead_K, output_size, DRAFT)
        frontier_Bm = state.roots[:, None]
        slots_Bm = torch.zeros_like(frontier_Bm)
        tokens, probs = [frontier_Bm], [noise_BKV.new_zeros(batch, 1, output_size)]
        heads_state = self.heads.begin(state.hidden, self.vocabulary, cached)
        for head, (children_C, picks_m) in enumerate(zip(self._shape.candidates, self._shape.picks, strict=True)):
            logits, heads_state = self.heads.level(head, heads_state, slots_Bm, frontier_Bm, self.vocabulary)
            logprobs_BmV = (logits.float() / self.temperature).log_softmax(-1).nan_to_num(nan=LOWEST).clamp(min=LOWEST)
            logprobs_BmV = logprobs_BmV.expand(-1, frontier_Bm.shape[1], -1)
            drawn_BmW = (logprobs_BmV + noise_BKV[:, head, None]).topk(width).indices
            places_C, ranks_C = children_C // width, children_C % width
            probs.append(_distributions(logprobs_BmV[:, places_C], drawn_BmW[:, places_C], ranks_C))
            tokens_BM = self.heads.token_ids(drawn_BmW).flatten(1)
            tokens.append(tokens_BM[:, children_C])
            frontier_Bm, slots_Bm = tokens_BM[:, picks_m], (picks_m // width).expand(batch, -1)
        parents_BN = self._parents_N.expand(batch, -1)
        probs_BNV = self._over_all_tokens(torch.cat(probs, dim=1))
        return Draft.of(torch.cat(tokens, dim=1), parents_BN, self.tree.depth, probs_BNV)

    def _over_all_tokens(self, probs_BNV: Tensor) -> Tensor:
        """Distributions over the whole vocabulary: tokens that heads cannot draft have probability 0."""
        if self.heads.draft_ids is None:
            return probs_BNV
        whole = probs_BNV.new_zeros(*probs_BNV.shape[:2], self.heads.config.vocab_size)
        return whole.index_copy_(2, self.heads.draft_ids, probs_BNV)


def _distributions(logprobs_BCV: Tensor, drawn_BCW: Tensor, ranks_C: Tensor) -> Tensor:
    """[B, C, V] the distribution of the draw of each rank, without the tokens drawn before it."""
    before_CW = torch.arange(drawn_BCW.shape[-1], device=ranks_C.device) < ranks_C[:, None]
    taken_BCV = torch.zeros_like(logprobs_BCV).scatter_add_(2, drawn_BCW, before_CW.float().expand_as(drawn_BCW))
    return logprobs_BCV.masked_fill(taken_BCV > 0, -torch.inf).softmax(-1)
