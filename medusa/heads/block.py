"""Block heads: one pass drafts all depths (after DFlash, Chen et al. 2026, and DSpark).

Each draft is a block of rows after the text, one per depth, which see the text and each other. They cannot see the
tokens that are being drafted; a correction by the previous drafted token adds these (as in ``markov``).

Legend: M positions, R of them that are anchors of a block, K heads, N rows of a block, B sequences, m tree nodes of a
level, V vocabulary, D hidden size, H attention heads, G key heads, d head size; of documents computed together: n
documents, l positions, r anchors.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.attention import Scoring, TreePlan, attend_rows
from medusa.base.usual_block import UnusualBlockError
from medusa.cache import BlockPool, Cached, Follower, Texts
from medusa.cpu.fused_layers import FusedLayers, LayerWeights
from medusa.cpu.native import LinearFunction, native_linear
from medusa.heads.base import HeadsConfig, Vocabulary
from medusa.heads.blocks import unit_embeddings
from medusa.heads.decoder import DecoderLayer
from medusa.heads.documents import Documents
from medusa.heads.markov import behind_output
from medusa.heads.remembering import RememberingHeads
from medusa.tree import Draft


class Beginning(NamedTuple):
    """The state before the first level: the layers' cached texts, and the fused states [B, D] at the last positions."""

    texts: Texts
    state: Tensor


class BlockHeads(RememberingHeads):
    """Head k's feature is ``norm(x_k) + Q P e_k``; x_k is row k of the block after position t, after all layers.

    x_k starts as ``s + W norm(e_1) + d_k``: s fuses the outputs of the base's feature layers at t (without such layers
    it is the last hidden state), e_k is the base's embedding of the k-th token after t, and d_k is learnt. Row k has
    position t + k. In each layer it sees all rows of its block, and keys and values made of norm(s) at all positions up
    to t. A vocabulary matrix reads the feature; the base's matrix reads norm(x_k) times ``gain``. All summands start
    at 0, so the logits of fresh heads are those of s.

    With ``config.mask_token`` x_1 starts as e_1 itself, and all others as the embedding of that token. With
    ``config.own_correction`` a row of a table replaces P e_k, and Q maps it to a summand of the logits. With
    ``config.skip_root`` the row of e_1 stands before x_1, so that x_k has position t + k + 1, that of the token it
    guesses.

    Attributes:
        depths: [K, D] d.
        down: P [R, D], with R = ``config.rank``, or the table [vocabulary, R]; None = there is no correction.
        up: Q [D, R], or [V, R].
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        dim, rank, layer = config.hidden_size, config.rank, self._layer
        self.text_norm = nn.RMSNorm(dim, layer.rms_norm_eps)
        if config.mask_token is None:
            self.root_norm = nn.RMSNorm(dim, layer.rms_norm_eps)
            self.root_proj = nn.Linear(dim, dim, bias=False)
            nn.init.zeros_(self.root_proj.weight)
            self.depths = nn.Parameter(torch.zeros(config.num_heads, dim))
        layers = nn.ModuleList(DecoderLayer(dim, layer) for _ in range(config.num_layers))
        self.layers: Iterable[DecoderLayer] = layers  # type: ignore[assignment]
        self.down: nn.Module | None = None
        self.up: nn.Linear | None = None
        if rank:
            own = config.own_correction
            self.down = nn.Embedding(config.vocab_size, rank) if own else nn.Linear(dim, rank, bias=False)
            self.up = nn.Linear(rank, config.output_size if own else dim, bias=False)
            nn.init.zeros_(self.up.weight)
        self._raised: LinearFunction | None = None  # maps the correction to logits, if it can be added to them

    def join(self, vocabulary: Vocabulary) -> None:
        """See ``DraftHeads.join``; also makes the KV cache, and joins the correction with the output layer."""
        super().join(vocabulary)
        self.memory = BlockMemory(self, vocabulary)
        if self.up is None:
            return
        up, own = self.up.weight, self.config.own_correction
        if own or self.lm_heads is not None or vocabulary.linear:
            self._raised = native_linear(up if own else behind_output(self, up, vocabulary))

    def rows(self, state_RD: Tensor, roots_R: Tensor, vocabulary: Vocabulary) -> Tensor:
        """The blocks' rows [R, N, D] before the layers, from s and the tokens after it."""
        if (mask := self.config.mask_token) is not None:
            unknown_RK = roots_R[:, None].new_full((len(roots_R), self.config.block_rows - 1), mask)
            return vocabulary.embed(torch.cat([roots_R[:, None], unknown_RK], dim=1)).to(state_RD.dtype)
        embedded_RD = self.root_norm(vocabulary.embed(roots_R).to(state_RD.dtype))
        rows_RKD: Tensor = (state_RD + self.root_proj(embedded_RD))[:, None] + self.depths
        return rows_RKD

    def low(self, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
        """P e [..., R] of the previous tokens [...], or their rows of the table; R = 0 if there is no correction."""
        if self.down is None or self.up is None:
            return torch.empty(*tokens.shape, 0, dtype=self.output_norm.weight.dtype, device=tokens.device)
        if not self.config.own_correction:
            tokens = unit_embeddings(tokens, vocabulary, self.up.weight.dtype)
        low: Tensor = self.down(tokens)
        return low

    def head_logits(self, head: int, features: Tensor, vocabulary: Vocabulary) -> Tensor:
        """See ``DraftHeads``; with ``own_correction``, features of ``forward`` end in the input of the correction."""
        said, low = features.tensor_split([self.config.hidden_size], dim=-1)
        logits = super().head_logits(head, said, vocabulary)
        return logits if self.up is None or not low.shape[-1] else logits + self.up(low)

    def drafted(self, state_MD: Tensor, path_MK: Tensor, vocabulary: Vocabulary, documents: Documents) -> Tensor:
        """See ``RememberingHeads``; every position where heads guess is the anchor of its own block.

        Raises:
            ValueError: Layers have windows of their own.
        """
        if self.config.layer_windows:
            raise ValueError("heads whose layers have windows of their own (layer_windows) are not trained here")
        anchors_R, ahead_N = documents.wanted, torch.arange(self.config.block_rows, device=state_MD.device)
        text_MD, places_RN = self.text_norm(state_MD), documents.places[:, None] + 1 + ahead_N
        x_RND = self.rows(state_MD[anchors_R], path_MK[anchors_R, 0], vocabulary)
        reach = documents.longest + self.config.block_rows
        of_text, of_rows = (self.rotary.at(places, reach, x_RND) for places in (documents.text_places, places_RN))
        for layer in self.layers:
            normed_RND = layer.input_norm(x_RND)
            text, block = layer.key_value(text_MD, of_text), layer.key_value(normed_RND, of_rows)
            x_RND = layer.finish(x_RND, _attend(documents, layer.query(normed_RND, of_rows), *block, *text))
        features_RKD = self.scaled(self.output_norm(x_RND[:, self.config.skip_root :]))
        low_RKR, corrected = self.low(path_MK[anchors_R], vocabulary), not self.config.own_correction
        if corrected and self.up is not None:
            features_RKD = features_RKD + self.up(low_RKR)
        else:
            features_RKD = torch.cat([features_RKD, low_RKR], dim=-1)
        return features_RKD.transpose(0, 1)

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Beginning:
        """The layers' cache of the committed texts."""
        return Beginning(*self.remembered(cached))

    def level(
        self, head: int, state: Beginning | Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] of the level's nodes. The first level computes the block; its result is the later state.

        That is logits [B, K, V] if corrections can be added to logits, otherwise features [B, K, D].
        """
        if isinstance(state, Beginning):
            assert isinstance(self.memory, BlockMemory), "begin has asked"
            state = self.scaled(self.memory.draft(*state, tokens_Bm[:, 0]))
            if self._raised is not None or self.up is None:
                state = self.head_logits(0, state, vocabulary)
        before = state[:, head, None]
        if self.up is None:
            return before, state
        low_BmR = self.low(tokens_Bm, vocabulary)
        if self._raised is None:
            return self.head_logits(head, before + self.up(low_BmR), vocabulary), state
        return before + self._raised(low_BmR), state


class BlockMemory(Follower):
    """Keys and values of the layers for the texts that they draft for.

    A row of this follower is the fused state at its position, which is also its output.

    Args:
        heads: Frozen heads.
        vocabulary: The base's embeddings and output layer.

    Attributes:
        fused: The passes over a text and over a block as one C++ call each; None if the kernel does not support them.
    """

    def __init__(self, heads: BlockHeads, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary.attention, next(heads.parameters()).device, heads._layer.window)
        self._heads, self._vocabulary = heads, vocabulary
        windows = heads.config.layer_windows or (0,) * heads.config.num_layers
        self._scorings = [Scoring(heads._layer.head_dim**-0.5, window or None) for window in windows]
        self.fused = _fused(heads, vocabulary, windows)

    def new_pool(self) -> BlockPool:
        """An empty cache."""
        return BlockPool(self._heads.config.num_layers, self._device)

    def states(self, hidden: Tensor) -> Tensor:
        """See ``BlockHeads.fuse``."""
        return self._heads.fuse(hidden)

    def run(self, pool: BlockPool, plan: TreePlan, states_RD: Tensor) -> Tensor:
        """Compute and cache the rows' keys and values in all layers; returns the states."""
        heads = self._heads
        if self.fused is not None:
            return self.fused[0](pool, plan, heads.rotary.tables(plan.reach, states_RD), states_RD)
        text_RD, angles = heads.text_norm(states_RD), heads.rotary.at(plan.positions, plan.reach, states_RD)
        with pool.cache.running(plan) as cache:
            for index, layer in enumerate(heads.layers):
                key, value = layer.key_value(text_RD, angles)
                cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], index)
        return states_RD

    def draft(self, texts: Texts, state_BD: Tensor, roots_B: Tensor) -> Tensor:
        """The block's rows that guess [B, K, D], after all layers and the last norm.

        Its keys and values are stored after the text's, until later tokens overwrite them.
        """
        heads, pool = self._heads, texts.pool
        x_BND = heads.rows(state_BD, roots_B, self._vocabulary)
        x_RD = x_BND.flatten(0, 1)
        block = dataclasses.replace(Draft.chain(roots_B[:, None].expand(x_BND.shape[:2])), together=True)
        plan = self.plan(texts, block)
        if self.fused is not None:
            x_RD = self.fused[1](pool, plan, heads.rotary.tables(plan.reach, x_RD), x_RD)
        else:
            x_RD = heads.output_norm(self._through(pool, plan, x_RD))
        return x_RD.view_as(x_BND)[:, heads.config.skip_root :]

    def _through(self, pool: BlockPool, plan: TreePlan, x_RD: Tensor) -> Tensor:
        """The block's rows after all layers."""
        heads = self._heads
        angles = heads.rotary.at(plan.positions, plan.reach, x_RD)
        with pool.cache.running(plan) as cache:
            for index, layer in enumerate(heads.layers):
                normed_RD = layer.input_norm(x_RD)
                key, value = layer.key_value(normed_RD, angles)
                keys, values = cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], index)
                mixed_RHd = attend_rows(plan, layer.query(normed_RD, angles), keys, values, self._scorings[index])
                x_RD = layer.finish(x_RD, mixed_RHd)
        return x_RD


def _fused(heads: BlockHeads, vocabulary: Vocabulary, windows: Sequence[int]) -> tuple[FusedLayers, FusedLayers] | None:
    """The C++ passes over a text and over a block; None if the kernel does not support these layers."""
    shape = heads._layer
    if vocabulary.matrices is None or vocabulary.attention.name != "exact":
        return None
    ends, sizes = vocabulary.matrices, shape.sizes
    text = [
        LayerWeights([layer.k_proj, layer.v_proj], heads.text_norm.weight, **layer.norms_of_heads("key"))
        for layer in heads.layers
    ]
    block = [
        LayerWeights(
            layer.linears, layer.input_norm.weight, layer.mlp_norm.weight, window=window, **layer.norms_of_heads()
        )
        for layer, window in zip(heads.layers, windows, strict=True)
    ]
    try:
        return FusedLayers(text, ends, **sizes), FusedLayers(block, ends, heads.output_norm.weight, **sizes)
    except UnusualBlockError:
        return None


def _attend(
    documents: Documents, query_RKHd: Tensor, key_RKGd: Tensor, value_RKGd: Tensor, key_MGd: Tensor, value_MGd: Tensor
) -> Tensor:
    """Attention outputs [R, K, H, d]: a block sees the text of its document up to its anchor, and itself."""
    rows = [documents.places, query_RKHd, key_RKGd, value_RKGd]
    return documents.joined([
        _attend_some(documents.unseen(places, len(key[0])), key, value, *block)
        for (key, value), (places, *block) in documents.groups([key_MGd, value_MGd], rows)
    ])  # fmt: skip


def _attend_some(
    unseen: Tensor, key: Tensor, value: Tensor, query: Tensor, block_key: Tensor, block_value: Tensor
) -> Tensor:
    """``_attend`` for n documents: unseen [n, r, l], the texts' tensors [n, l, G, d], a block's [n, r, K, .., d]."""
    length, groups, size = key.shape[1:]
    query = query.unflatten(3, (groups, -1))
    text = torch.einsum("nrkghd,nlgd->nrkghl", query, key).masked_fill(unseen[:, :, None, None, None], -torch.inf)
    block = torch.einsum("nrkghd,nrjgd->nrkghj", query, block_key)
    weights = (torch.cat([text, block], dim=-1) * size**-0.5).softmax(-1)
    out = torch.einsum("nrkghl,nlgd->nrkghd", weights[..., :length], value)
    return (out + torch.einsum("nrkghj,nrjgd->nrkghd", weights[..., length:], block_value)).flatten(3, 4)
