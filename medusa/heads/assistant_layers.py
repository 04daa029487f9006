"""The layers of Gemma 4's assistants, which have queries only; see ``medusa.heads.assistant``.

Legend: B sequences, m tree nodes of a level, A hidden size of the assistant, H heads, G key heads of the base, d head
size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from medusa.attention import Scoring, TreePlan, attend_rows
from medusa.attention.contract import BlockTable
from medusa.cache import BlockPool
from medusa.heads.decoder import turned
from medusa.tree import Draft

WINDOWED = "sliding_attention"


@dataclass(frozen=True)
class AssistantConfig:
    """The layers of an assistant; names and meanings are those of transformers' ``Gemma4TextConfig``."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    layer_types: tuple[str, ...]
    head_dims: dict[str, int]
    """Head sizes by kind of layer."""
    sliding_window: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    num_centroids: int = 0
    """Parts of the vocabulary that are scored first; 0 = all tokens are scored at once."""
    centroids_read: int = 32
    """Best centroids whose tokens are scored."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", tuple(self.layer_types))  # JSON has lists only
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "sliding_window", "centroids_read"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"assistant's {name} ({value!r}) must be at least 1; correct its config")
        if unknown := set(self.layer_types) - set(self.head_dims):
            raise ValueError(f"assistant's head_dims lack {', '.join(sorted(unknown))}; correct its config")
        if self.num_centroids and self.centroids_read > self.num_centroids:
            raise ValueError(
                f"assistant reads {self.centroids_read} centroids (centroids_read) of {self.num_centroids}; correct"
                " its config"
            )

    def angles(self, kind: str, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, d] of layers of this kind, in the dtype and on the device of ``like``."""
        config = Gemma4TextConfig(
            num_hidden_layers=len(self.layer_types), layer_types=list(self.layer_types),
            head_dim=self.head_dims[kind], global_head_dim=self.head_dims[kind],
            max_position_embeddings=self.max_position_embeddings, rope_parameters=self.rope_parameters,
        )  # fmt: skip
        rotary = Gemma4TextRotaryEmbedding(config).to(like.device)
        cosines, sines = rotary(like, torch.arange(positions, device=like.device)[None], kind)
        return cosines[0], sines[0]


class AssistantLayer(nn.Module):
    """``y = x + norm(Attention(norm(x)))``, then ``(y + norm(MLP(norm(y)))) * layer_scalar``.

    Args:
        config: The sizes.
        kind: The kind of its attention.
    """

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        super().__init__()
        self.kind, self.size = kind, config.head_dims[kind]
        self.window = config.sliding_window + 1 if kind == WINDOWED else None  # as in transformers' mask
        dim, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads * self.size
        norm = partial(nn.RMSNorm, eps=config.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(dim), norm(dim)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(dim), norm(dim)
        self.q_proj, self.o_proj = nn.Linear(dim, heads, bias=False), nn.Linear(heads, dim, bias=False)
        self.q_norm = norm(self.size)
        self.gate_proj, self.up_proj = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, dim, bias=False)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x_BmA: Tensor, text: "Text", angles: tuple[Tensor, Tensor]) -> Tensor:
        """The layer's output [B, m, A]; ``angles`` are those of the roots' positions."""
        query_BmHd = self.q_norm(self.q_proj(self.input_layernorm(x_BmA)).unflatten(-1, (-1, self.size)))
        seen_BmHd = text.attend(self.kind, turned(query_BmHd, angles), self.window)
        x_BmA = x_BmA + self.post_attention_layernorm(self.o_proj(seen_BmHd.flatten(-2)))
        normed = self.pre_feedforward_layernorm(x_BmA)
        gated = functional.gelu(self.gate_proj(normed), approximate="tanh") * self.up_proj(normed)
        out: Tensor = (x_BmA + self.post_feedforward_layernorm(self.down_proj(gated))) * self.layer_scalar
        return out


class Text(NamedTuple):
    """The cached texts of a draft.

    Attributes:
        pool: The base's keys and values.
        layers: The base's layer to read for each kind of attention.
        plan: A pass with one row for each text, which stands at its last cached position: it sees the cached text.
    """

    pool: BlockPool
    layers: dict[str, int]
    plan: TreePlan

    def rows(self, count: int) -> TreePlan:
        """The plan with this number of rows for each text, all at its last cached position."""
        plan, size = self.plan, self.plan.table.size
        draft = Draft.chain(plan.tokens.repeat_interleave(count)[:, None])
        table = BlockTable(plan.table.blocks.repeat_interleave(count, 0), size)
        return TreePlan([draft], plan.lengths.repeat_interleave(count), plan.kv_length, table, plan.backend)

    def attend(self, kind: str, query_BmHd: Tensor, window: int | None) -> Tensor:
        """What queries see of their texts [B, m, H, d].

        All nodes of a level see the same positions. So they are more heads of one row, and keys are read once.
        """
        arena = self.pool.arenas[self.layers[kind]]
        assert arena.keys is not None and arena.values is not None, "the base has computed the prompt"
        groups = arena.keys.shape[2]
        grouped = query_BmHd.unflatten(2, (groups, -1)).transpose(1, 2)  # [B, G, m, H / G, d]
        heads_BHd = grouped.flatten(1, 3).to(arena.keys.device)
        out = attend_rows(self.plan, heads_BHd, arena.keys, arena.values, Scoring(1.0, window)).to(query_BmHd.device)
        return out.view(grouped.shape).transpose(1, 2).flatten(2, 3)
