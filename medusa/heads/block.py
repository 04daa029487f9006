"""Heads that draft all depths in one pass over the text (after DFlash, Chen et al. 2026, and DSpark).

Each draft is a block of K rows behind the text, one per depth, which see the text and each other. What they cannot see,
the tokens that are being drafted, reaches the guesses through a correction by the token just before (as in ``markov``).

Legend: M positions, R of them that are anchors of a block, K heads, B sequences, m tree nodes of a level, V vocabulary,
D hidden size, H attention heads, G key heads, d head size, L positions of a document.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from medusa.attention import Scoring, TreePlan, attend
from medusa.attention.contract import BlockTable
from medusa.cache import BlockPool, CachedSequence, Follower, plan_pass
from medusa.cpu.native import LinearFunction, native_linear
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary
from medusa.heads.blocks import unit_embeddings
from medusa.heads.decoder import DecoderLayer, Rotary
from medusa.heads.markov import behind_output
from medusa.tree import Draft


class Beginning(NamedTuple):
    """Before the roots are known: the layers' sequences, and the fused states [B, D] at their last positions."""

    own: Sequence[CachedSequence]
    state: Tensor


class BlockHeads(DraftHeads):
    """Head k's feature is ``norm(x_k) + Q P e_k``; x_k is row k of the block behind position t, through all layers.

    x_k starts as ``s + W norm(e_1) + d_k``: s fuses the outputs of the base's feature layers at t (the last hidden
    state where there are none), e_k is the base's embedding of the k-th token after t, d_k is learnt. Row k stands at
    position t + k. In each layer it sees all rows of its block, and keys and values made of norm(s) at all positions up
    to t. A vocabulary matrix reads the feature, the base's a multiple of each number of norm(x_k). All that is added
    starts at 0: fresh heads predict what s names.

    Attributes:
        depths: [K, D] d.
        down: [R, D] P, with R = ``config.rank``.
        up: [D, R] Q.
    """

    remembers = True
    one_output = True

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        if config.layer is None:
            raise ValueError("heads' layer (None) must be given for the architecture block; correct the heads' config")
        self._layer = layer = config.layer
        dim, taps, rank = config.hidden_size, len(config.feature_layers), config.rank
        self.feature_norm = nn.Parameter(torch.ones(taps, dim)) if taps and layer.norm_features else None
        if self.fusion is not None:
            nn.init.eye_(self.fusion.weight[:, -dim:])
        self.text_norm, self.root_norm, self.output_norm = (nn.RMSNorm(dim, layer.rms_norm_eps) for _ in range(3))
        self.root_proj = nn.Linear(dim, dim, bias=False)
        nn.init.zeros_(self.root_proj.weight)
        self.depths = nn.Parameter(torch.zeros(config.num_heads, dim))
        layers = nn.ModuleList(DecoderLayer(dim, layer) for _ in range(config.num_layers))
        self.layers: Iterable[DecoderLayer] = layers  # type: ignore[assignment]
        self.gain = nn.Parameter(torch.ones(dim)) if self.lm_heads is None else None
        self.down = nn.Parameter(torch.empty(rank, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.up = nn.Parameter(torch.zeros(dim, rank))
        self.rotary = Rotary(layer)
        self._low_rank: tuple[LinearFunction, LinearFunction] | None = None  # P and W Q of frozen heads

    def init_from_base(self, lm_head_weight: Tensor, last_norm_D: Tensor | None = None) -> None:
        """Besides, what the vocabulary matrix reads starts at the scale of what the base's reads."""
        super().init_from_base(lm_head_weight, last_norm_D)
        scaled = self.lm_heads if self.gain is None else self.gain
        if last_norm_D is not None and scaled is not None:
            with torch.no_grad():
                scaled.mul_(last_norm_D)

    def join(self, vocabulary: Vocabulary) -> None:
        """Besides, the layers get their cache, and the correction has the output layer behind it."""
        super().join(vocabulary)
        self.memory = BlockMemory(self, vocabulary)
        if self.lm_heads is not None or vocabulary.linear:
            self._low_rank = native_linear(self.down), native_linear(behind_output(self, self.up, vocabulary))

    def fuse(self, hidden: Tensor) -> Tensor:
        """s [..., D] of the base's hidden states [..., F]."""
        last, layers = self.split(hidden)
        if self.fusion is None:
            return last
        if self.feature_norm is not None:
            layers = functional.rms_norm(layers, layers.shape[-1:], eps=self._layer.rms_norm_eps) * self.feature_norm
        fused: Tensor = self.fusion(layers.flatten(-2))
        return fused

    def rows(self, state_RD: Tensor, roots_R: Tensor, vocabulary: Vocabulary) -> Tensor:
        """The blocks' rows [R, K, D] in front of the layers, from s and the tokens behind it."""
        embedded_RD = self.root_norm(vocabulary.embed(roots_R).to(state_RD.dtype))
        rows_RKD: Tensor = (state_RD + self.root_proj(embedded_RD))[:, None] + self.depths
        return rows_RKD

    def finish(self, x: Tensor) -> Tensor:
        """What a vocabulary matrix reads [..., D] of rows behind the layers, but for the correction."""
        normed: Tensor = self.output_norm(x)
        return normed if self.gain is None else normed * self.gain

    def correction(self, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
        """[..., D]: Q P e of the tokens [...] just before."""
        embedded = unit_embeddings(tokens, vocabulary, self.down.dtype)
        return functional.linear(functional.linear(embedded, self.down), self.up)

    def forward(
        self,
        hidden_MF: Tensor,
        path_MK: Tensor,
        vocabulary: Vocabulary,
        places_M: Tensor | None = None,
        wanted_M: Tensor | None = None,
    ) -> Tensor:
        """Features [K, M, D] on the given path: every position that is wanted is the anchor of a block of its own."""
        if places_M is None:
            places_M = torch.arange(len(hidden_MF), device=hidden_MF.device)
        if wanted_M is None:
            wanted_M = torch.ones_like(places_M, dtype=torch.bool)
        anchors_R, ahead_K = wanted_M.nonzero()[:, 0], torch.arange(path_MK.shape[1], device=places_M.device)
        state_MD, places_RK = self.fuse(hidden_MF), places_M[anchors_R, None] + 1 + ahead_K
        text_MD, documents = self.text_norm(state_MD), _Documents(places_M, wanted_M)
        x_RKD = self.rows(state_MD[anchors_R], path_MK[anchors_R, 0], vocabulary)
        reach = documents.longest + path_MK.shape[1]
        of_text, of_rows = (self.rotary.at(places, reach, x_RKD) for places in (places_M, places_RK))
        for layer in self.layers:
            normed_RKD = layer.input_norm(x_RKD)
            text, block = layer.key_value(text_MD, of_text), layer.key_value(normed_RKD, of_rows)
            x_RKD = layer.finish(x_RKD, documents.attend(layer.query(normed_RKD, of_rows), *block, *text))
        features_RKD = self.finish(x_RKD) + self.correction(path_MK[anchors_R], vocabulary)
        features_KRD = features_RKD.transpose(0, 1)
        shape = (len(features_KRD), len(places_M), features_KRD.shape[2])
        return features_KRD.new_zeros(shape).index_copy(1, anchors_R, features_KRD)

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, sequences: Sequence[CachedSequence] = ()) -> Beginning:
        """What the base has committed, in the layers' cache."""
        if self.memory is None or not sequences:
            raise ValueError("block heads draft behind what is cached of a text; decode with MedusaModel or Batch")
        return Beginning(*self.memory.read(sequences))

    def level(
        self, head: int, state: Beginning | Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] of the level's nodes. The first level makes the pass, which is the state from then on.

        It is logits [B, K, V] where corrections can be added to them, or features [B, K, D].
        """
        if isinstance(state, Beginning):
            assert isinstance(self.memory, BlockMemory), "begin has asked"
            state = self.finish(self.memory.draft(*state, tokens_Bm[:, 0]))
            if self._low_rank is not None:
                state = self.head_logits(0, state, vocabulary)
        before = state[:, head, None]
        if self._low_rank is None:
            return self.head_logits(head, before + self.correction(tokens_Bm, vocabulary), vocabulary), state
        down, raised = self._low_rank
        return before + raised(down(unit_embeddings(tokens_Bm, vocabulary, self.down.dtype))), state


class BlockMemory(Follower):
    """Keys and values that the layers have made of the texts that they draft for.

    A row is the fused state at its position, which is also its output.

    Args:
        heads: Frozen.
        vocabulary: Both ends of their base.
    """

    def __init__(self, heads: BlockHeads, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary.attention, next(heads.parameters()).device)
        self._heads, self._vocabulary = heads, vocabulary
        self._scoring = Scoring(heads._layer.head_dim**-0.5)

    def new_pool(self) -> BlockPool:
        """An empty cache."""
        return BlockPool(self._heads.config.num_layers, self._device)

    def states(self, hidden: Tensor) -> Tensor:
        """See ``BlockHeads.fuse``."""
        return self._heads.fuse(hidden)

    def run(self, pool: BlockPool, plan: TreePlan, states_RD: Tensor) -> Tensor:
        """The rows' keys and values in all layers; returns the states."""
        heads = self._heads
        text_RD, angles = heads.text_norm(states_RD), heads.rotary.at(plan.positions, plan.kv_length, states_RD)
        with pool.cache.running(plan) as cache:
            for index, layer in enumerate(heads.layers):
                key, value = layer.key_value(text_RD, angles)
                cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], index)
        return states_RD

    def draft(self, own: Sequence[CachedSequence], state_BD: Tensor, roots_B: Tensor) -> Tensor:
        """The block's rows [B, K, D] behind all layers.

        Its keys and values stand for a while where the text goes on. Each row then reads as a sequence of one token
        does that has all the others before it: the order in which keys stand means nothing to attention.
        """
        heads, pool = self._heads, own[0].pool
        x_BKD = heads.rows(state_BD, roots_B, self._vocabulary)
        batch, depths, _ = x_BKD.shape
        plan = plan_pass([(Draft.chain(roots_B[:, None].expand(-1, depths)), own)], self.attention)
        table = BlockTable(plan.table.blocks.repeat_interleave(depths, 0), plan.table.size)
        ends_R = (plan.lengths + depths - 1).repeat_interleave(depths)
        alone = Draft.chain(plan.tokens[:, None])
        reading = TreePlan([alone], ends_R, plan.kv_length, table, self.attention)
        x_RD, angles = x_BKD.flatten(0, 1), heads.rotary.at(plan.positions, plan.kv_length, x_BKD)
        with pool.cache.running(plan) as cache:
            for index, layer in enumerate(heads.layers):
                normed_RD = layer.input_norm(x_RD)
                key, value = layer.key_value(normed_RD, angles)
                keys, values = cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], index)
                mixed_RHd = attend(reading, layer.query(normed_RD, angles), keys, values, self._scoring)
                x_RD = layer.finish(x_RD, mixed_RHd)
        return x_RD.view(batch, depths, -1)


class _Documents:
    """Which positions of several documents in a row belong together.

    Args:
        places_M: Of all positions, each document's counted from 0.
        wanted_M: Where blocks begin.

    Attributes:
        longest: Positions of the longest document.
    """

    def __init__(self, places_M: Tensor, wanted_M: Tensor) -> None:
        begins = [0, *(places_M[1:] == 0).nonzero()[:, 0].add(1).tolist()]
        self._lengths = [end - begin for begin, end in zip(begins, [*begins[1:], len(places_M)], strict=True)]
        self._counts = [int(part.sum()) for part in wanted_M.split(self._lengths)]
        self._places_R, self.longest = places_M[wanted_M], max(self._lengths)

    def attend(
        self, query_RKHd: Tensor, key_RKGd: Tensor, value_RKGd: Tensor, key_MGd: Tensor, value_MGd: Tensor
    ) -> Tensor:
        """[R, K, H, d]: blocks see the text of their document up to their anchors, and themselves."""
        blocks = [rows.split(self._counts) for rows in (self._places_R, query_RKHd, key_RKGd, value_RKGd)]
        texts = [rows.split(self._lengths) for rows in (key_MGd, value_MGd)]
        return torch.cat([_attend(*parts) for parts in zip(*blocks, *texts, strict=True)])


def _attend(
    places_R: Tensor, query_RKHd: Tensor, key_RKGd: Tensor, value_RKGd: Tensor, key_LGd: Tensor, value_LGd: Tensor
) -> Tensor:
    """The same of one document."""
    length, groups, size = key_LGd.shape
    query = query_RKHd.unflatten(2, (groups, -1))
    later_RL = torch.arange(length, device=places_R.device) > places_R[:, None]
    text = torch.einsum("rkghd,lgd->rkghl", query, key_LGd).masked_fill(later_RL[:, None, None, None], -torch.inf)
    block = torch.einsum("rkghd,rjgd->rkghj", query, key_RKGd)
    weights = (torch.cat([text, block], dim=-1) * size**-0.5).softmax(-1)
    out = torch.einsum("rkghl,lgd->rkghd", weights[..., :length], value_LGd)
    return (out + torch.einsum("rkghj,rjgd->rkghd", weights[..., length:], value_RKGd)).flatten(2, 3)
