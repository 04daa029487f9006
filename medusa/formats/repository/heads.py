"""Draft heads for a causal language model of transformers: their weights, and the trees that they draft.

Legend: B sequences, A new rows of their texts, N tree nodes with the root, m nodes of one level, W children of a node,
K heads, D hidden size, F = D * (1 + feature layers), V vocabulary. The root is the newest token of a text.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from .base import Base, Tree
from .remembering import Attention, Block, Memory

WIDTH = 16  # most children of a node
MIN_BEAM = 4  # least number of nodes of a level that get children
LOWEST = -40.0  # bound on a log-probability, so that heads that overflow still draft trees
EDGE_COST = 1e-4  # keeps a parent's score above that of a certain child
LAYERS = {"attention": Attention, "block": Block}
DAMAGES = (
    json.JSONDecodeError, UnicodeDecodeError, SafetensorError, IndexError, KeyError, RuntimeError, TypeError,
)  # fmt: skip


class Heads:
    """K heads of the architecture "medusa", "markov", "hydra", "recurrent", "attention" or "block".

    Attributes:
        feature_layers: Layers of the model, counted from 1, whose outputs follow the last hidden state.
    """

    def __init__(self, base: Base, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._kind, self._count, self._blocks = (config[k] for k in ("architecture", "num_heads", "num_layers"))
        layers = base.config.num_hidden_layers
        self.feature_layers = [at + layers if at < 0 else at or layers // 2 for at in config["feature_layers"]]
        ids = tensors.pop("draft_ids", None)
        self._tensors = {name: tensor.to(base.device, base.dtype) for name, tensor in tensors.items()}
        self._ids = None if ids is None else ids.to(base.device)
        self._rows = None if self._ids is None or "lm_heads" in tensors else base.output_rows(self._ids)
        self._layers = LAYERS[self._kind](config, self._tensors) if self._kind in LAYERS else None

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
            token_11 = torch.zeros(1, 1, dtype=torch.int64, device=base.device)
            memory = heads.remember(base, None, hidden_1F[:, None], token_11, token_11)
            heads.draft(base, token_11[0], hidden_1F, nodes=64, memory=memory)
        except DAMAGES as error:
            raise ValueError(f"heads ({weights_path.parent}) are damaged: {error!r}; export them again") from error
        return heads

    def remember(
        self, base: Base, memory: Memory | None, hidden_BAF: Tensor, tokens_BA: Tensor, positions_BA: Tensor
    ) -> Memory | None:
        """What heads know of texts that have grown; None if they need no more than a hidden state.

        Args:
            base: The model.
            memory: What they knew before; None = nothing.
            hidden_BAF: The model's hidden states at the new rows.
            tokens_BA: The tokens that follow these rows.
            positions_BA: Their positions; HOLE where there is none.
        """
        if self._layers is None:
            return None
        return self._layers.remember(base, memory, hidden_BAF, tokens_BA.to(base.device), positions_BA)

    def draft(self, base: Base, roots_B: Tensor, hidden_BF: Tensor, nodes: int, memory: Memory | None = None) -> Tree:
        """Draft the likeliest tree below each root: the best nodes of a level get children, the best of all are kept.

        Args:
            base: The model.
            roots_B: Newest tokens.
            hidden_BF: The hidden states that predicted them.
            nodes: Largest N.
            memory: The result of ``remember``.
        """
        tokens_Bm, slots_Bm = roots_B[:, None], torch.zeros_like(roots_B[:, None])
        columns_Bm, scores_Bm = slots_Bm, slots_Bm.float()  # a column numbers a candidate, over all levels
        tokens, parents, scores = [tokens_Bm], [columns_Bm], [scores_Bm]
        depth, beam = min(self._count, nodes - 1), max(MIN_BEAM, nodes // 4)
        state = self._begin(base, roots_B, hidden_BF, memory)
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

    def _begin(self, base: Base, roots_B: Tensor, hidden_BF: Tensor, memory: Memory | None) -> Any:
        """The root's state [B, 1, D]; for heads that do not read the path, the features of all levels [K, B, D]."""
        if self._layers is not None and memory is not None:
            return self._layers.begin(base, memory, roots_B, hidden_BF)
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

    def _level(self, base: Base, head: int, state: Any, slots_Bm: Tensor, tokens_Bm: Tensor) -> tuple[Tensor, Any]:
        """Logits [B, m, V] of the children of m nodes, or [B, 1, V] if all are equal, and the nodes' states.

        Args:
            base: The model.
            head: 0-based; also the depth of the nodes.
            state: State of the previous level.
            slots_Bm: Index of each node's parent in that level.
            tokens_Bm: The nodes' tokens.
        """
        t = self._tensors
        if self._layers is not None:
            features, state = self._layers.level(base, head, state, slots_Bm, tokens_Bm)
        elif self._kind in ("medusa", "markov"):
            features = state[head][:, None]
            if self._kind == "markov":  # corrected by the previous token
                features = features + linear(linear(base.unit_embed(tokens_Bm), t["down"][head]), t["up"][head])
        else:  # each node has a state that its children read in addition to its token
            tokens_BmD = base.unit_embed(tokens_Bm)
            state = state.gather(1, slots_Bm[..., None].expand(-1, -1, state.shape[-1]))
            hidden, path = state.tensor_split([tokens_BmD.shape[-1]], dim=-1)
            features, read = hidden, torch.cat([path, tokens_BmD], dim=-1)
            for block in range(self._blocks):
                name = f"blocks.{head}.{block}" if self._kind == "hydra" else f"blocks.{block}"
                inner = linear(torch.cat([features, read], dim=-1), t[f"{name}.inner.weight"], t[f"{name}.inner.bias"])
                features = features + linear(silu(inner), t[f"{name}.outer.weight"])
            state = torch.cat([hidden, read], dim=-1) if self._kind == "hydra" else features
        features, low = features.tensor_split([base.hidden_size], dim=-1)
        if "lm_heads" in t:  # one matrix per head, or one for all
            logits = linear(features, t["lm_heads"].expand(self._count, -1, -1)[head])
        else:
            logits = base.logits(features, self._rows)
        return logits + linear(low, t["up.weight"]) if low.shape[-1] else logits, state
