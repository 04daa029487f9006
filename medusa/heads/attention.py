"""Attention heads: one decoder layer that is applied repeatedly to its own output (EAGLE-3, Li et al. 2025).

It sees the text through a KV cache of its own, which follows the base's (``medusa.cache.Follower``).

Legend: M positions, K heads, B sequences, m tree nodes of a level, N nodes so far, R rows of a pass, D hidden size,
H attention heads, G key heads, d head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.attention import Scoring, TreePlan, attend
from medusa.base.usual_block import UnusualBlockError
from medusa.cache import BlockPool, Cached, Follower, Texts
from medusa.cpu.fused_layers import FusedLayers, LayerWeights
from medusa.heads.base import HeadsConfig, Vocabulary
from medusa.heads.blocks import of_parents
from medusa.heads.decoder import Projections
from medusa.heads.documents import Documents
from medusa.heads.remembering import RememberingHeads
from medusa.heads.unrolled import Text
from medusa.tree import Draft


class Growth(NamedTuple):
    """A growing tree: the layer's cached texts, the nodes so far [B, N], and its outputs [B, m, D] at the last m."""

    texts: Texts
    tokens: Tensor
    parents: Tensor
    out: Tensor


class AttentionHeads(RememberingHeads, Projections):
    """Head k is the layer's k-th pass; g_k is its output, e_k the base's embedding of the k-th token after position t.

    g_k = y + MLP(norm(y)) with y = s + Attention([norm(e_k); norm(s)]). For the first head
    s = W [norm(h_1); ..; norm(h_n)], where h are the outputs of the base's feature layers (without such layers s is the
    last hidden state). For later heads s = g_{k-1} (normed with ``norm_output``). ``LayerConfig`` has the variants of
    other code. Pass k sees keys and values of the first pass at all positions up to t, which read the base's states,
    and those of later passes at t only. A vocabulary matrix reads norm(g_k); the base's matrix reads it times ``gain``.
    Both branches start at 0, and W starts as a copy of the last feature layer.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        dim, layer = config.hidden_size, self._layer
        self.token_norm, self.state_norm = (nn.RMSNorm(dim, layer.rms_norm_eps) for _ in range(2))
        self.fill(2 * dim, dim, layer)

    def join(self, vocabulary: Vocabulary) -> None:
        """See ``DraftHeads.join``; also makes the layer's KV cache."""
        super().join(vocabulary)
        self.memory = LayerMemory(self, vocabulary)

    def drafted(self, state_MD: Tensor, path_MK: Tensor, vocabulary: Vocabulary, documents: Documents) -> Tensor:
        """See ``RememberingHeads``; computes pass by pass."""
        text, state, features = Text(documents), state_MD, []
        rows, places_R = torch.arange(len(state), device=state.device), documents.text_places
        for ahead, tokens_M in enumerate(path_MK.unbind(1)):
            embedded = vocabulary.embed(tokens_M[rows]).to(state.dtype)
            query, key, value = self.project(state, embedded, places_R + ahead, documents.longest + path_MK.shape[1])
            if not ahead:  # only the first pass needs keys and values of all positions
                rows, places_R = documents.wanted, documents.places
                query, state = query[rows], state[rows]
            text.keys.append(key)
            text.values.append(value)
            out = self.finish(state, text.attend(query))
            normed = self.output_norm(out)
            features.append(self.scaled(normed))
            state = self.handed_down(out, normed)
        return torch.stack(features)

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Growth:
        """The layer's outputs at the roots, which it computed from the committed texts."""
        texts, out_BD = self.remembered(cached)
        nothing_B1 = torch.zeros(len(out_BD), 1, dtype=torch.int64, device=out_BD.device)
        return Growth(texts, nothing_B1, nothing_B1, out_BD[:, None])

    def level(
        self, head: int, state: Growth, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Growth]:
        """Logits [B, m, V] of the level's nodes, and the tree with these nodes."""
        if head:
            state = self._grow(state, parents_Bm, tokens_Bm)
        return self.head_logits(head, self.scaled(self.output_norm(state.out)), vocabulary), state

    def _grow(self, tree: Growth, parents_Bm: Tensor, tokens_Bm: Tensor) -> Growth:
        """Compute another level: each node sees the text and the nodes above it."""
        assert self.memory is not None, "begin has asked"
        computed, above = tree.tokens.shape[1], tree.out.shape[1]
        tokens_BN = torch.cat([tree.tokens, tokens_Bm], dim=1)
        parents_BN = torch.cat([tree.parents, computed - above + parents_Bm], dim=1)
        states_BmD = of_parents(self.handed_down(tree.out, self.output_norm(tree.out)), parents_Bm)
        draft = Draft.of(tokens_BN, parents_BN, depth=computed)
        # The root is cached already: it is the last row of the text and the tree's first node.
        plan = self.memory.plan(tree.texts, draft, ahead=-1, computed=computed, committed=1)
        out_RD = self.memory.run(tree.texts.pool, plan, states_BmD.flatten(0, 1))
        return Growth(tree.texts, tokens_BN, parents_BN, out_RD.view_as(states_BmD))

    def handed_down(self, out: Tensor, normed: Tensor) -> Tensor:
        """The part of the layer's output that the next pass reads."""
        return normed if self._layer.norm_output else out

    def project(
        self, state_RD: Tensor, embedded_RD: Tensor, positions_R: Tensor, reach: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, H, d], keys and values [R, G, d] of rows.

        Args:
            state_RD: States from the previous pass.
            embedded_RD: Embeddings of the tokens that follow.
            positions_R: int64 positions.
            reach: Larger than all positions.
        """
        both = torch.cat([self.token_norm(embedded_RD), self.state_norm(state_RD)], dim=-1)
        angles = self.rotary.at(positions_R, reach, both)
        return self.query(both, angles), *self.key_value(both, angles)

    def finish(self, state_RD: Tensor, mixed_RHd: Tensor) -> Tensor:
        """The layer's output [R, D], from the states and the attention outputs."""
        state_RD = self.state_norm(state_RD) if self._layer.norm_before_residual else state_RD
        return super().finish(state_RD, mixed_RHd)


class LayerMemory(Follower):
    """The layer's KV cache of the texts that it drafts for.

    Args:
        heads: Frozen heads.
        vocabulary: The base's embeddings and output layer.

    Attributes:
        fused: A pass as one C++ call; None if the kernel does not support the layer.
    """

    def __init__(self, heads: AttentionHeads, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary.attention, next(heads.parameters()).device, heads._layer.window)
        self._heads, self._vocabulary = heads, vocabulary
        self._scoring = Scoring(heads._layer.head_dim**-0.5)
        self.fused = _fused(heads, vocabulary)

    def states(self, hidden: Tensor) -> Tensor:
        """See ``AttentionHeads.fuse``."""
        return self._heads.fuse(hidden)

    def run(self, pool: BlockPool, plan: TreePlan, states_RD: Tensor) -> Tensor:
        """A pass of the layer over rows of trees; on a CPU one C++ call if the kernel supports the layer."""
        heads = self._heads
        if self.fused is not None:
            return self.fused(pool, plan, heads.rotary.tables(plan.reach, states_RD), states_RD)
        embedded_RD = self._vocabulary.embed(plan.tokens).to(states_RD.dtype)
        query_RHd, key_RGd, value_RGd = heads.project(states_RD, embedded_RD, plan.positions, plan.reach)
        with pool.cache.running(plan) as cache:
            keys, values = cache.update(key_RGd.transpose(0, 1)[None], value_RGd.transpose(0, 1)[None], 0)
        return heads.finish(states_RD, attend(plan, query_RHd, keys, values, self._scoring))


def _fused(heads: AttentionHeads, vocabulary: Vocabulary) -> FusedLayers | None:
    """The layer as one C++ call; None if the kernel does not support it."""
    if vocabulary.matrices is None or vocabulary.attention.name != "exact":
        return None
    layer = heads._layer
    if layer.norm_before_residual:
        return None
    norms = heads.state_norm.weight, heads.mlp_norm.weight, heads.token_norm.weight
    weights = LayerWeights(heads.linears, *norms, **heads.norms_of_heads())
    try:
        return FusedLayers([weights], vocabulary.matrices, **layer.sizes)
    except UnusualBlockError:
        return None
