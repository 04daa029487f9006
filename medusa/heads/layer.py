"""The shape of the decoder layers of heads with a KV cache: that of the base, as far as it is like Llama's.

This file needs only torch and transformers, because a copy of it is exported with heads.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles depend on the position alone."""


@dataclass(frozen=True)
class LayerConfig:
    """Names and meanings are those of transformers' ``LlamaConfig``."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0})
    norm_features: bool = True
    """Norm the output of each feature layer, with its own weights (EAGLE 3.1: ``fc_norm``)."""
    norm_jointly: bool = False
    """With ``norm_features``: norm all of them as one vector (``norm_before_fc`` in other code)."""
    norm_output: bool = True
    """The next depth reads the layer's output after its last norm (EAGLE 3.1), not before it."""
    norm_before_residual: bool = False
    """Attention is added to the normed state, not to the state."""
    norm_heads: bool = False
    """Norm queries and keys head by head, as Qwen 3 does."""
    attention_bias: bool = False
    """The projections of its attention have biases."""
    window: int | None = None
    """A row sees this many last positions of the text (up to a block more) and the first ones; None = the whole text.
    See ``medusa.cache.window``."""

    def __post_init__(self) -> None:
        sizes = ["num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"]
        for name in sizes if self.window is None else [*sizes, "window"]:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"layer's {name} ({value!r}) must be a whole number of at least 1; correct the heads' config"
                )
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"layer's {self.num_attention_heads} heads of size {self.head_dim} must be a multiple of its key heads"
                f" ({self.num_key_value_heads}) and of even size; correct the heads' config"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig, **options: Any) -> "LayerConfig":
        """The shape of a base's layer, from the config of its language model.

        Rotary positions that depend on more than the position (those that stretch with the text) are not copied.

        Args:
            config: The config of the base.
            **options: Fields for norms, biases and the window.
        """
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)  # if kinds of layers differ
        theta = float(rope.get("rope_theta") or 10_000.0)
        known = rope.get("rope_type") in ROTARY and rope.get("partial_rotary_factor", 1.0) == 1.0
        # If layers have different sizes (Gemma 4), those of the first one.
        layer = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
        heads = layer.num_attention_heads
        return cls(
            num_attention_heads=heads,
            num_key_value_heads=getattr(layer, "num_key_value_heads", None) or heads,
            head_dim=getattr(layer, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=getattr(layer, "intermediate_size", None) or 4 * config.hidden_size,
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
            max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2048,
            rope_parameters=dict(rope) if known else {"rope_type": "default", "rope_theta": theta},
            **options,
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes as arguments of ``FusedLayers``."""
        return {
            "heads": self.num_attention_heads, "kv_heads": self.num_key_value_heads, "dim": self.head_dim,
            "epsilon": self.rms_norm_eps,
        }  # fmt: skip

    def head_norms(self) -> tuple[nn.Module, nn.Module]:
        """Norms of queries and keys [..., head_dim]."""
        if not self.norm_heads:
            return nn.Identity(), nn.Identity()
        return nn.RMSNorm(self.head_dim, self.rms_norm_eps), nn.RMSNorm(self.head_dim, self.rms_norm_eps)

    def rotary(self) -> LlamaRotaryEmbedding:
        """Computes the angles of positions."""
        config = LlamaConfig(
            hidden_size=self.num_attention_heads * self.head_dim, num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim, rope_parameters=self.rope_parameters,
            max_position_embeddings=self.max_position_embeddings,
        )  # fmt: skip
        return LlamaRotaryEmbedding(config)

    def angles(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, head_dim], in the dtype and on the device of ``like``."""
        rotary = self.rotary().to(like.device)
        cosines, sines = rotary(like, torch.arange(positions, device=like.device)[None])
        return cosines[0], sines[0]
