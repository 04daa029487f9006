"""Draft heads for a causal language model of transformers: their weights, and the trees that they draft.

Legend: B sequences, N tree nodes with the root, m nodes of one level, W children of a node, K heads, D hidden size,
F = D * (1 + feature layers), V vocabulary. The root is the newest token of a text.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Identity
from torch.nn.functional import linear, rms_norm, silu

from .spans import MOST, Span, layer_spans

WIDTH = 16  # most children of a node
MIN_BEAM = 4  # least number of nodes of a level that get children
LOWEST = -40.0  # bound on a log-probability, so that heads that overflow still draft trees
EDGE_COST = 1e-4  # keeps a parent's score above that of a certain child
DAMAGES = (
    json.JSONDecodeError, UnicodeDecodeError, SafetensorError, IndexError, KeyError, RuntimeError, TypeError,
)  # fmt: skip


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
        self.project = getattr(self.decoder, "project_out", None) or Identity()
        self.spans: dict[int | None, Span] = {}  # windows by layer, see ``find_spans``
        scale, scaling = (getattr(self.config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
        self._scale, self._cap = scale / scaling, getattr(self.config, "final_logit_softcapping", None)

    def find_spans(self) -> None:
        """Get the windows of the layers from transformers; raises ValueError for other kinds of masks."""
        length = getattr(self.config, "max_position_embeddings", None) or MOST
        self.spans = layer_spans(self.model, self.decoder, length)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] at unit scale, the input of heads."""
        vectors = self._embeddings(tokens.to(self._embeddings.weight.device)).to(self.device, self.dtype)
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


class Heads:
    """K heads of the architecture "medusa", "markov", "hydra" or "recurrent".

    Attributes:
        feature_layers: Layers of the model, counted from 1, whose outputs follow the last hidden state.
    """

    def __init__(self, base: Base, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._kind, self._count, self._blocks = (config[k] for k in ("architecture", "num_heads", "num_layers"))
        self.feature_layers: list[int] = config["feature_layers"]
        ids = tensors.pop("draft_ids", None)
        self._tensors = {name: tensor.to(base.device, base.dtype) for name, tensor in tensors.items()}
        self._ids = None if ids is None else ids.to(base.device)
        self._rows = None if self._ids is None or "lm_heads" in tensors else base.output_rows(self._ids)

    @classmethod
    def load(cls, base: Base, config_path: Path, weights_path: Path) -> "Heads":
        """Read heads for a model.

        Raises:
            ValueError: The heads are damaged or belong to another model.
        """
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
            for name, size in (("hidden_size", base.hidden_size), ("vocab_size", base.config.vocab_size)):
                if config[name] not in (0, size):  # 0: not known
                    raise ValueError(
                        f"heads' {name} ({config[name]}) is not the model's ({size}); these heads belong to"
                        f" {config['base'] or 'another model'}: load that one"
                    )
            heads = cls(base, config, load_file(weights_path))
            width = config["hidden_size"] * (1 + len(heads.feature_layers))
            hidden_1F = torch.zeros(1, width, dtype=base.dtype, device=base.device)
            heads.draft(base, hidden_1F[:, 0].long(), hidden_1F, nodes=64)
        except DAMAGES as error:
            raise ValueError(f"heads ({weights_path.parent}) are damaged: {error!r}; export them again") from error
        return heads

    def draft(self, base: Base, roots_B: Tensor, hidden_BF: Tensor, nodes: int) -> Tree:
        """Draft the likeliest tree below each root: the best nodes of a level get children, the best of all are kept.

        Args:
            base: The model.
            roots_B: Newest tokens.
            hidden_BF: The hidden states that predicted them.
            nodes: Largest N.
        """
        tokens_Bm, slots_Bm = roots_B[:, None], torch.zeros_like(roots_B[:, None])
        columns_Bm, scores_Bm = slots_Bm, slots_Bm.float()  # a column numbers a candidate, over all levels
        tokens, parents, scores = [tokens_Bm], [columns_Bm], [scores_Bm]
        state, depth, beam = self._begin(hidden_BF), min(self._count, nodes - 1), max(MIN_BEAM, nodes // 4)
        for head in range(depth):
            logits, state = self._level(base, head, state, slots_Bm, tokens_Bm)
            best = logits.log_softmax(-1, dtype=torch.float32).topk(min(WIDTH, logits.shape[-1]), dim=-1)
            logprobs_BmW = best.values.nan_to_num(nan=LOWEST).clamp(LOWEST, 0.0) - EDGE_COST
            scores_BmW = scores_Bm[..., None] + logprobs_BmW
            ids_BmW = best.indices if self._ids is None else self._ids[best.indices]
            first = sum(part.shape[1] for part in scores)
            tokens.append(ids_BmW.expand_as(scores_BmW).flatten(1))
            parents.append(columns_Bm[..., None].expand_as(scores_BmW).flatten(1))
            scores.append(scores_BmW.flatten(1))
            scores_Bm, picked_Bm = scores[-1].topk(min(beam, scores[-1].shape[1]))
            slots_Bm, columns_Bm = picked_Bm // scores_BmW.shape[2], picked_Bm + first
            tokens_Bm = tokens[-1].gather(1, picked_Bm)
        tokens_BM, parents_BM, scores_BM = (torch.cat(parts, dim=1) for parts in (tokens, parents, scores))
        chosen_BN = scores_BM.topk(min(nodes, scores_BM.shape[1])).indices.sort(-1).values
        order_BN = torch.arange(chosen_BN.shape[1], device=roots_B.device).expand_as(chosen_BN)
        node_BM = torch.zeros_like(parents_BM).scatter_(1, chosen_BN, order_BN)
        return Tree.of(tokens_BM.gather(1, chosen_BN), node_BM.gather(1, parents_BM.gather(1, chosen_BN)), depth)

    def _begin(self, hidden_BF: Tensor) -> Tensor:
        """The root's state [B, 1, D]; for heads that do not read the path, the features of all levels [K, B, D]."""
        t, count = self._tensors, len(self.feature_layers)
        x_BD, layers = hidden_BF.tensor_split([hidden_BF.shape[-1] // (1 + count)], dim=-1)
        if count:
            layers = rms_norm(layers.unflatten(-1, (count, -1)), x_BD.shape[-1:]).flatten(-2)
            x_BD = x_BD + linear(layers, t["fusion.weight"])
        if self._kind in ("hydra", "recurrent"):
            return x_BD[:, None]
        x_KBD = x_BD.expand(self._count, -1, -1)
        for weight_KDD, bias_KD in zip(t["weight"], t["bias"], strict=True):
            x_KBD = x_KBD + silu(torch.baddbmm(bias_KD[:, None], x_KBD, weight_KDD.transpose(1, 2)))
        return x_KBD

    def _level(
        self, base: Base, head: int, state: Tensor, slots_Bm: Tensor, tokens_Bm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, m, V] of the children of m nodes, or [B, 1, V] if all are equal, and the nodes' states.

        Args:
            base: The model.
            head: 0-based; also the depth of the nodes.
            state: State of the previous level.
            slots_Bm: Index of each node's parent in that level.
            tokens_Bm: The nodes' tokens.
        """
        t = self._tensors
        if self._kind in ("medusa", "markov"):
            features = state[head][:, None]
            if self._kind == "markov":  # corrected by the previous token
                features = features + linear(linear(base.embed(tokens_Bm), t["down"][head]), t["up"][head])
        else:  # each node has a state that its children read in addition to its token
            tokens_BmD = base.embed(tokens_Bm)
            state = state.gather(1, slots_Bm[..., None].expand(-1, -1, state.shape[-1]))
            hidden, path = state.tensor_split([tokens_BmD.shape[-1]], dim=-1)
            features, read = hidden, torch.cat([path, tokens_BmD], dim=-1)
            for block in range(self._blocks):
                name = f"blocks.{head}.{block}" if self._kind == "hydra" else f"blocks.{block}"
                inner = linear(torch.cat([features, read], dim=-1), t[f"{name}.inner.weight"], t[f"{name}.inner.bias"])
                features = features + linear(silu(inner), t[f"{name}.outer.weight"])
            state = torch.cat([hidden, read], dim=-1) if self._kind == "hydra" else features
        if "lm_heads" in t:
            return linear(features, t["lm_heads"][head]), state
        return base.logits(features, self._rows), state
