"""A decoder layer like the base's, in pieces for heads with a KV cache of their own.

Legend: R rows, H attention heads, G key heads, d head size, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from medusa.heads.layer import LayerConfig


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [..., heads, d] rotated by the angles of their rows' positions."""
    left, right = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat([-right, left], dim=-1) * angles[1]


class Projections(nn.Module):
    """The parts of a layer behind its input norm; both branches start at 0."""

    def fill(self, inputs: int, dim: int, layer: LayerConfig) -> None:
        """Make the parts, for rows [..., inputs]."""
        inner, size = layer.intermediate_size, layer.head_dim
        self._size = size
        self.mlp_norm = nn.RMSNorm(dim, layer.rms_norm_eps)
        queries, keys, bias = layer.num_attention_heads * size, layer.num_key_value_heads * size, layer.attention_bias
        self.query_norm, self.key_norm = layer.head_norms()
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(inputs, keys, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(queries, dim, bias=bias)
        self.gate_proj, self.up_proj = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, dim, bias=False)
        for parameter in (*self.o_proj.parameters(), self.down_proj.weight):
            nn.init.zeros_(parameter)

    @property
    def linears(self) -> list[nn.Linear]:
        """Query, key, value, output, gate, up and down projection."""
        attention, mlp = (self.q_proj, self.k_proj, self.v_proj, self.o_proj), (self.gate_proj, self.up_proj)
        return [*attention, *mlp, self.down_proj]

    def norms_of_heads(self, *names: str) -> dict[str, Any]:
        """Weights of the norms of queries and keys (or of these) by name; none if there are no such norms."""
        norms = {f"{name}_norm": getattr(self, f"{name}_norm") for name in names or ("query", "key")}
        return {name: norm.weight for name, norm in norms.items() if isinstance(norm, nn.RMSNorm)}

    def query(self, normed: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [..., H, d] of normed rows [..., D]."""
        return turned(self.query_norm(self.q_proj(normed).unflatten(-1, (-1, self._size))), angles)

    def key_value(self, normed: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values [..., G, d] of normed rows [..., D]."""
        key, value = (linear(normed).unflatten(-1, (-1, self._size)) for linear in (self.k_proj, self.v_proj))
        return turned(self.key_norm(key), angles), value

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [..., D] for rows x and their attention outputs [..., H, d]."""
        x = x + self.o_proj(mixed.flatten(-2))
        normed = self.mlp_norm(x)
        out: Tensor = x + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out


class DecoderLayer(Projections):
    """``y = x + Attention(norm(x))``, then ``y + MLP(norm(y))``.

    Args:
        dim: D.
        layer: The sizes.
    """

    def __init__(self, dim: int, layer: LayerConfig) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(dim, layer.rms_norm_eps)
        self.fill(dim, dim, layer)
