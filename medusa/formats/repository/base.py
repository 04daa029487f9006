"""A causal language model of transformers in parts, with its cache, and trees of tokens that it verifies.

Legend: B sequences, T tokens, L cached rows, N tree nodes with the root, A rows of the longest accepted path, D hidden
size, F = D * (1 + feature layers), V vocabulary. The root is the newest token of a text: its keys and values are not
cached yet.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm
from transformers import DynamicCache

from .spans import MOST, Span, layer_spans
from .taps import DecoderPass

HOLE = -1  # position of a cached row that nobody sees


class Tree(NamedTuple):
    """Drafted tokens of each sequence; a parent comes before its children, and node 0 is the root."""

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]; the root's is the root
    ancestors: Tensor  # [B, N, N] bool: entry (i, j) is true where j is i or above it

    @classmethod
    def of(cls, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> "Tree":
        """Trees with these tokens and parents, with at most ``depth`` edges from root to leaf."""
        nodes = tokens_BN.shape[1]
        itself = ancestors = torch.eye(nodes, dtype=torch.bool, device=tokens_BN.device).expand(len(tokens_BN), -1, -1)
        for _ in range(depth):
            ancestors = itself | ancestors.gather(1, parents_BN[..., None].expand(-1, -1, nodes))
        return cls(tokens_BN, parents_BN, ancestors)

    def children(self) -> list[dict[tuple[int, int], int]]:
        """For each sequence: (parent, token) -> node."""
        edges = torch.stack([self.parents, self.tokens], dim=-1)[:, 1:].tolist()
        return [{(parent, token): node for node, (parent, token) in enumerate(row, start=1)} for row in edges]


class Base:
    """The model in parts: decoder, embeddings and output layer."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, decoder = model, model.config.get_text_config(), model.get_decoder()
        self.decoder = model.model if decoder is model else decoder
        self._embeddings, self._lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.device, self.dtype = self._lm_head.weight.device, model.dtype
        # OPT-350M projects the output of its layers to the width of its embeddings.
        self.hidden_size: int = getattr(self.config, "word_embed_proj_dim", None) or self.config.hidden_size
        self.spans: dict[int | None, Span] = {}  # windows by layer, see ``find_spans``
        scale, scaling = (getattr(self.config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
        self._scale = scale * scaling if self.config.model_type == "hyperclovax" else scale / scaling
        self._cap = getattr(self.config, "final_logit_softcapping", None)

    def find_spans(self) -> None:
        """Get the windows of the layers from transformers; raises ValueError for other kinds of masks."""
        length = getattr(self.config, "max_position_embeddings", None) or MOST
        self.spans = layer_spans(self.model, self.decoder, length)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] of tokens [...]."""
        vectors: Tensor = self._embeddings(tokens.to(self._embeddings.weight.device))
        return vectors.to(self.device, self.dtype)

    def unit_embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] at unit scale; the scales of models differ by far."""
        vectors = self.embed(tokens)
        return rms_norm(vectors, vectors.shape[-1:])

    def output_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output layer for some tokens only."""
        bias = getattr(self._lm_head, "bias", None)
        return self._lm_head.weight[tokens], None if bias is None else bias[tokens]

    def logits(self, hidden: Tensor, rows: tuple[Tensor, Tensor | None] | None = None) -> Tensor:
        """Logits [..., V] for hidden states [..., D], of the whole output layer or some of its rows."""
        logits: Tensor = self._lm_head(hidden) if rows is None else linear(hidden, *rows)
        logits = logits * self._scale if self._scale != 1.0 else logits
        return self._cap * torch.tanh(logits / self._cap) if self._cap else logits


class Rows:
    """The model with its cache. If sequences keep different numbers of rows, shorter ones get holes.

    Attributes:
        cache: Keys and values of the kept rows.
        kept: Positions [B, L] of these rows; HOLE where there is none.
    """

    def __init__(self, base: Base, feature_layers: Sequence[int]) -> None:
        self.cache = DynamicCache()
        self._base, self._decode = base, DecoderPass(base.decoder, feature_layers, base.config.num_hidden_layers)
        self.kept = self._new = torch.empty(0)  # [B, N] positions of the last pass

    def prefill(self, tokens_BT: Tensor, positions_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Hidden states [B, T, F] of the prompts, whose last tokens are the roots."""
        self.kept, self._new = positions_BT.to(self._base.device).tensor_split([-1], dim=1)
        if mask_BT is not None:
            self.kept = self.kept.where(mask_BT[:, :-1].to(self._base.device) > 0, HOLE)
            mask_BT = mask_BT.to(self._base.model.device)
        return self._forward(tokens_BT, positions_BT, mask_BT)

    def verify(self, tree: Tree, last_B1: Tensor) -> Tensor:
        """Hidden states [B, N, F] of trees; those after positions ``last_B1`` are not used."""
        self._new = (self.kept.amax(1, keepdim=True) + tree.ancestors.sum(-1)).minimum(last_B1)
        return self._forward(tree.tokens, self._new, self._masks(tree))

    def keep(self, paths: list[list[int]]) -> Tensor:
        """Keep one path of the last pass per sequence; returns the nodes [B, A], with HOLE before shorter paths."""
        start, longest = self.kept.shape[1], max(map(len, paths))
        path_BA = torch.tensor([[HOLE] * (longest - len(path)) + path for path in paths], device=self._base.device)
        nodes_BA = path_BA.clamp(min=0)
        self.kept = torch.cat([self.kept, self._new.gather(1, nodes_BA).where(path_BA != HOLE, HOLE)], dim=1)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                rows_BHLD = getattr(layer, name)
                index = (start + nodes_BA)[:, None, :, None].to(rows_BHLD.device)
                index = index.expand(-1, rows_BHLD.shape[1], -1, rows_BHLD.shape[3])
                rows_BHLD[:, :, start : start + longest] = rows_BHLD.gather(2, index)
                setattr(layer, name, rows_BHLD[:, :, : start + longest])
        return path_BA

    def leave_hole(self, size: int) -> None:
        """Skip ``size`` rows of the cache, which no row sees."""
        hole_BT = torch.full((len(self.kept), max(size, 0)), HOLE, device=self.kept.device)
        self.kept = torch.cat([self.kept, hole_BT], dim=1)
        for layer in self.cache.layers:
            layer.keys, layer.values = (pad(rows, (0, 0, 0, hole_BT.shape[1])) for rows in (layer.keys, layer.values))

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Any) -> Tensor:
        device = self._base.model.device
        hidden = self._decode(
            input_ids=tokens.to(device), position_ids=positions.to(device), attention_mask=mask, return_dict=True,
            past_key_values=self.cache, use_cache=True,
        )  # fmt: skip
        return hidden.to(self._base.device)

    def _masks(self, tree: Tree) -> Any:
        """Additive masks [B, 1, N, L + N], by kind of layer if there are several."""
        dtype, spans = self._base.dtype, self._base.spans
        seen = (self.kept != HOLE)[:, None].expand(-1, tree.tokens.shape[1], -1)
        seen = torch.cat([seen, tree.ancestors], dim=-1)
        distance = self._new[..., None] - torch.cat([self.kept, self._new], dim=1)[:, None]
        zero = torch.zeros((), dtype=dtype, device=seen.device)
        biases = {}
        for span in {*spans.values()} or {Span()}:
            if span.chunk is not None:
                raise ValueError(f"chunks ({span.chunk} tokens) are not supported here")
            visible = seen if span.window is None else seen & (distance < span.window)
            biases[span] = torch.where(visible, zero, torch.finfo(dtype).min)[:, None]
        if len(biases) == 1:
            return biases.popitem()[1]
        return {kind: biases[spans[index]] for index, kind in enumerate(self._base.config.layer_types)}
