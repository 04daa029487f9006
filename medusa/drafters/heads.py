"""Drafting with trained heads: the tree grows level by level, one head per level."""

import dataclasses
import math

import torch
from torch import Tensor

from medusa.cache import Cached
from medusa.cpu import native
from medusa.cpu.growth import Grown, Growth, NativeGrowth
from medusa.cpu.recurrent import RecurrentDrafts
from medusa.cpu.selection import gumbel, keys
from medusa.drafters.base import Drafter
from medusa.drafters.merge import EDGE_COST, node_floor
from medusa.heads import DraftHeads, HeadsConfig, Vocabulary
from medusa.state import DecodeState
from medusa.tree import Draft, Tree, ragged

WIDTH = 16
"""Most children of a node of a dynamic tree."""
MIN_BEAM = 4
"""Least number of nodes per level of a dynamic tree that get children; or a quarter of the budget if that is more."""
LEVEL_FLOOR = math.log(0.35)
"""On a CPU a level of a dynamic tree is drafted if a node above it has at least this score."""
LOWEST = -40.0
"""Lower bound of a log-probability, so that heads that overflow still give trees."""


class HeadsDrafter(Drafter):
    """Fills a tree with the heads' best tokens.

    With ``tree`` every step has that topology. Otherwise every step chooses its own. A node's score is the sum of the
    heads' log-probabilities along its path. The best nodes of each level get children, and the best ``nodes`` of all
    are kept. A parent never scores below its child, so they form a tree. On a GPU shapes are fixed, and the host does
    not wait for the device.

    Args:
        heads: The trained heads.
        vocabulary: The base's embeddings and output layer.
        nodes: N for dynamic trees, the root included.
        tree: A static topology instead.
        host_decides: On a CPU: leave out unlikely levels and nodes of dynamic trees, so that shapes vary.
        temperature: Temperature of sampling whose draws depend on seed and position only (``sampling`` acceptance).
            Drafts then use the noise of the base's later draws, so they follow the draws and not the most likely
            tokens. 0 = draft the most likely tokens.

    Raises:
        ValueError: The tree is deeper than there are heads, or the budget is not positive.
    """

    def __init__(
        self,
        heads: DraftHeads,
        vocabulary: Vocabulary,
        nodes: int,
        tree: Tree | None = None,
        host_decides: bool = True,
        temperature: float = 0.0,
    ) -> None:
        num_heads, output_size = heads.config.num_heads, heads.config.output_size
        if tree is not None:
            check_tree(tree, heads.config)
        if nodes < 1:
            raise ValueError(f"nodes ({nodes}) must be at least 1 (1 = plain decoding); give a larger tree budget")
        self.heads, self.vocabulary, self._temperature = heads, vocabulary, temperature
        device = next(heads.parameters()).device
        self._tokens_V = heads.token_ids(torch.arange(output_size if temperature else 0, device=device))
        depth, width = min(num_heads, nodes - 1), min(WIDTH, output_size)
        host_decides = host_decides and device.type == "cpu"
        best_first = _BestFirst(nodes, depth, width, host_decides)
        self._shape: _BestFirst | StaticShape = best_first if tree is None else StaticShape(tree, device)
        self.recordable = tree is not None or not host_decides
        self.observers, self.sees_base = heads.observers, heads.sees_base
        self.places = max(heads.config.block_rows, sum(self._shape.growth().parents)) if heads.remembers else 0
        self.nodes = self._shape.nodes
        # A recorded step uses torch's operators only.
        self._native = heads.native.drafts(self._shape.growth()) if host_decides and heads.native else None
        self._growth: NativeGrowth | None = None
        if self._native is None and host_decides and native.reads(next(heads.parameters())) and self._shape.depth:
            self._growth = NativeGrowth(self._shape.growth(), output_size, heads.draft_ids)

    def propose(self, state: DecodeState, cached: Cached = (), /) -> Draft:
        """A draft below ``state.roots`` from the hidden state that predicted them."""
        if self.nodes == 1:
            return Draft.chain(state.roots[:, None])
        if self._native is not None:
            return _draft(self._in_one_call(self._native, state))
        if self._growth is not None:
            return _draft(self._by_levels(self._growth, state, cached))
        return self._grow(state, cached)

    def _in_one_call(self, drafts: RecurrentDrafts, state: DecodeState) -> Grown:
        """``_grow`` by a kernel that supports these heads."""
        ahead_K, keys_BK = torch.arange(self._shape.depth), None
        if self._temperature:
            keys_BK = keys(state.seeds, state.positions[:, None] + 1 + ahead_K)
        return drafts(self.heads.own(state.hidden), state.roots, state.active, keys_BK, self._temperature)

    def _by_levels(self, growth: NativeGrowth, state: DecodeState, cached: Cached) -> Grown:
        """``_grow`` with a kernel that grows trees from the heads' logits."""
        trees = growth.plant(state.roots, state.active)
        heads_state = self.heads.begin(state.hidden, self.vocabulary, cached)
        for head in range(self._shape.depth):
            logits, heads_state = self.heads.level(head, heads_state, trees.slots, trees.frontier, self.vocabulary)
            if self._temperature:
                logits = logits.float() + self._noise(state, head)[:, None]
            if not trees.grow(logits):
                break
        return trees.draft()

    def _grow(self, state: DecodeState, cached: Cached) -> Draft:
        frontier_Bm, shape = state.roots[:, None], self._shape
        # Columns number all candidates of the step, level by level; column 0 is the root.
        columns_Bm = slots_Bm = torch.zeros_like(frontier_Bm)
        # A finished sequence must not decide how far others are drafted; within a row only differences matter.
        scores_Bm = torch.where(state.active, 0.0, LOWEST)[:, None]
        tokens, parents, scores = [frontier_Bm], [columns_Bm], [scores_Bm]
        heads_state = self.heads.begin(state.hidden, self.vocabulary, cached)
        for head in range(shape.depth):
            logits, heads_state = self.heads.level(head, heads_state, slots_Bm, frontier_Bm, self.vocabulary)
            if self._temperature:
                logits = logits.float() + self._noise(state, head)[:, None]
            logprobs_BmW, best_BmW = logits.log_softmax(-1, dtype=torch.float32).topk(shape.width, dim=-1)
            logprobs_BmW = logprobs_BmW.nan_to_num(nan=LOWEST).clamp(min=LOWEST, max=0.0) - EDGE_COST
            scores_BmW = scores_Bm[:, :, None] + logprobs_BmW
            tokens.append(self.heads.token_ids(best_BmW).expand_as(scores_BmW).flatten(1))
            parents.append(columns_Bm[:, :, None].expand_as(scores_BmW).flatten(1))
            scores.append(scores_BmW.flatten(1))
            picked_Bm = shape.pick(head, scores[-1])
            if picked_Bm is None:
                break
            columns_Bm = picked_Bm + sum(part.shape[1] for part in scores[:-1])
            slots_Bm = picked_Bm // shape.width
            scores_Bm, frontier_Bm = scores[-1].gather(1, picked_Bm), tokens[-1].gather(1, picked_Bm)
        tokens_BM, parents_BM, scores_BM = (torch.cat(parts, dim=1) for parts in (tokens, parents, scores))
        chosen_BN = shape.choose(scores_BM)
        order_BN = torch.arange(chosen_BN.shape[1], device=chosen_BN.device).expand_as(chosen_BN)
        new_index_BM = torch.zeros_like(parents_BM).scatter_(1, chosen_BN, order_BN)
        parents_BN = new_index_BM.gather(1, parents_BM.gather(1, chosen_BN))
        scores_BN = scores_BM.gather(1, chosen_BN)
        draft = Draft.of(tokens_BM.gather(1, chosen_BN), parents_BN, depth=len(scores) - 1)
        draft, real_BN = dataclasses.replace(draft, scores=scores_BN), shape.real(scores_BN)
        return draft if real_BN is None else draft.keeping(real_BN)

    def _noise(self, state: DecodeState, head: int) -> Tensor:
        """Noise [B, V] to add to a head's logits: that of the base's draw of the guessed token.

        The base draws the argmax of z / T + g. The logits z' of a head estimate how likely each token is the argmax of
        z. The estimate for z / T + g is softmax(z' + T g).
        """
        keyed_B1 = keys(state.seeds, state.positions[:, None] + 1 + head)
        return self._temperature * gumbel(keyed_B1[:, 0], self._tokens_V)


def _draft(grown: Grown) -> Draft:
    return Draft(grown.tokens, grown.parents, grown.depth, sizes=ragged(grown.sizes), scores=grown.scores)


def check_tree(tree: Tree, config: HeadsConfig) -> None:
    """Check that heads of this shape can fill a static tree.

    Raises:
        ValueError: The tree is too deep or too wide.
    """
    if tree.depth > config.num_heads:
        raise ValueError(
            f"tree depth ({tree.depth}) exceeds the number of heads ({config.num_heads}); prune the tree or train more"
            " heads"
        )
    if tree.width > config.output_size:
        raise ValueError(
            f"tree width ({tree.width}) exceeds the tokens that the heads can draft ({config.output_size}); prune it"
        )


class _BestFirst:
    """Chooses the candidates that get children, and those that become the draft, by score.

    It takes as many as fit, or leaves out those below the floors, if the host decides.
    """

    def __init__(self, nodes: int, depth: int, width: int, host_decides: bool) -> None:
        self.depth, self.width, self._host_decides = depth, width, host_decides
        self._floor = node_floor(nodes)
        self._beam = max(MIN_BEAM, nodes // 4)
        self.nodes = min(nodes, 1 + sum(width * min(self._beam, width**level) for level in range(depth)))

    def pick(self, level: int, scores_BC: Tensor) -> Tensor | None:
        """[B, m] candidates of a level that get children; None if no level follows."""
        if level + 1 == self.depth:
            return None
        if self._host_decides and float(scores_BC.max()) < LEVEL_FLOOR:
            return None
        return scores_BC.topk(min(self._beam, scores_BC.shape[1])).indices

    def choose(self, scores_BM: Tensor) -> Tensor:
        """[B, N] ascending columns of the draft out of all candidates, the root (column 0) first."""
        # The root has the highest score.
        nodes = min(self.nodes, scores_BM.shape[1])
        if self._host_decides:
            nodes = max(1, min(nodes, int((scores_BM > self._floor).sum(-1).max())))
        return scores_BM.topk(nodes).indices.sort(-1).values

    def real(self, scores_BN: Tensor) -> Tensor | None:
        """[B, N] the nodes to keep in trees of different sizes; None = all."""
        if not self._host_decides or len(scores_BN) == 1:
            return None
        real_BN = scores_BN > self._floor
        real_BN[:, 0] = True
        return real_BN

    def growth(self) -> Growth:
        """The same parameters for the kernel."""
        return Growth(self.depth, self.width, self.nodes, self._beam, LEVEL_FLOOR, self._floor, LOWEST, EDGE_COST)


class StaticShape:
    """The same choice for the paths of a static tree.

    Attributes:
        candidates: By level, [C] the candidates (parent's index in the frontier * width + rank) that are nodes.
        picks: By level, [m] those that get children.
    """

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.nodes, self.depth, self.width = tree.nodes, tree.depth, tree.width
        inner = {path[:-1] for path in tree.paths}
        self.candidates: list[Tensor] = []
        self.picks: list[Tensor] = []
        frontier: list[tuple[int, ...]] = [()]
        columns, first = [torch.zeros(1, dtype=torch.int64, device=device)], 1
        for level in range(1, tree.depth + 1):
            slot = {path: index for index, path in enumerate(frontier)}
            place = {p: slot[p[:-1]] * tree.width + p[-1] for p in tree.paths if len(p) == level}
            self.candidates.append(torch.tensor(list(place.values()), device=device))
            columns.append(first + self.candidates[-1])
            first += len(frontier) * tree.width
            frontier = [path for path in place if path in inner]
            self.picks.append(torch.tensor([place[path] for path in frontier], dtype=torch.int64, device=device))
        self._columns = torch.cat(columns)

    def pick(self, level: int, scores_BC: Tensor) -> Tensor | None:
        """See ``_BestFirst``, here and below."""
        if level + 1 == self.depth:
            return None
        return self.picks[level].expand(len(scores_BC), -1)

    def choose(self, scores_BM: Tensor) -> Tensor:
        """The columns of the tree's nodes."""
        return self._columns.expand(len(scores_BM), -1)

    def real(self, scores_BN: Tensor) -> Tensor | None:
        """None: all nodes stay."""
        return None

    def growth(self) -> Growth:
        """The parameters for the kernel, without floors."""
        beam, columns = max([1, *map(len, self.picks)]), self._columns
        floor = -math.inf
        return Growth(self.depth, self.width, self.nodes, beam, floor, floor, LOWEST, EDGE_COST, self.picks, columns)
