"""The recurrent layers that a pass with our own kernels knows, recognised by their parts.

In a decoder they stand in place of attention (``medusa.base.usual_block``).
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

MIXERS = ("linear_attn", "mamba", "conv")
"""Their names in a decoder's layer."""
DELTA_RULE = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj", "A_log", "dt_bias"}
"""Parts of Qwen 3.5's layers."""
MAMBA = {"in_proj", "conv1d", "norm", "out_proj", "A_log", "dt_bias", "D"}
"""Parts of Mamba 2's layers in Granite 4 and Bamba."""
SHORT_CONVOLUTION = {"in_proj", "conv", "out_proj"}
"""Parts of LFM2's layers."""


class MixerParts(NamedTuple):
    """A recurrent layer.

    Attributes:
        kind: What it computes.
        inputs: The linear layers that read the hidden state, in the order of kernels/mixer.h.
        output: The last linear layer.
        filter: Weight [channels, width] of the convolution.
        bias: Its bias [channels], or None.
        silu: Whether SiLU follows the convolution.
        heads: Heads of values, 0 for a short convolution.
        key_heads: Heads, or groups, of queries and keys.
        keys: Size of a key.
        values: Size of a value.
        slopes: Factors [heads] on decays.
        steps: What is added [heads] to decays.
        skips: Factors [heads] on values that are added to outputs (Mamba 2).
        norm: Weight of the norm of outputs: [values] head by head, or [heads * values] over groups (Mamba 2).
        groups: Number of these groups.
        epsilon: Of that norm.
        bounds: Of steps (Mamba 2).
    """

    kind: Literal["short convolution", "delta rule", "Mamba 2"]
    inputs: list[Any]
    output: Any
    filter: Tensor
    bias: Tensor | None
    silu: bool = False
    heads: int = 0
    key_heads: int = 0
    keys: int = 0
    values: int = 0
    slopes: Tensor | None = None
    steps: Tensor | None = None
    skips: Tensor | None = None
    norm: Tensor | None = None
    groups: int = 1
    epsilon: float = 0.0
    bounds: tuple[float, float] = (0.0, 0.0)


@torch.no_grad()
def mixer_of(layer: Any) -> MixerParts | None:
    """The recurrent part of a decoder's layer; None = it has none that is known."""
    part: Any = next((getattr(layer, name) for name in MIXERS if getattr(layer, name, None) is not None), nn.Module())
    # Packed layers have no parameters; an activation ("act") has no part in what tells the kinds apart.
    own = [name for name, _ in part.named_parameters(recurse=False)]
    parts = {name for name, _ in part.named_children()} - {"act"} | set(own)
    try:
        return _read(part, parts)
    except AttributeError:  # another family's code, with parts of these names
        return None


def _read(part: Any, parts: set[str]) -> MixerParts | None:
    if parts == SHORT_CONVOLUTION:
        return MixerParts("short convolution", [part.in_proj], part.out_proj, _filter(part.conv), part.conv.bias)
    if parts == DELTA_RULE and part.activation == part.norm.activation == "silu":
        return MixerParts(
            "delta rule", [part.in_proj_qkv, part.in_proj_z, part.in_proj_b, part.in_proj_a], part.out_proj,
            _filter(part.conv1d), part.conv1d.bias, silu=True, heads=part.num_v_heads, key_heads=part.num_k_heads,
            keys=part.head_k_dim, values=part.head_v_dim, slopes=-part.A_log.float().exp(), steps=part.dt_bias,
            norm=part.norm.weight, epsilon=part.norm.variance_epsilon,
        )  # fmt: skip
    if parts == MAMBA and part.activation == "silu":
        return MixerParts(
            "Mamba 2", [part.in_proj], part.out_proj, _filter(part.conv1d), part.conv1d.bias, silu=True,
            heads=part.num_heads, key_heads=part.n_groups, keys=part.ssm_state_size, values=part.head_dim,
            slopes=-part.A_log.float().exp(), steps=part.dt_bias.to(part.conv1d.weight.dtype), skips=part.D,
            norm=part.norm.weight, groups=part.num_heads * part.head_dim // part.norm.group_size,
            epsilon=part.norm.variance_epsilon, bounds=part.time_step_limit,
        )  # fmt: skip
    return None


def _filter(convolution: nn.Conv1d) -> Tensor:
    return convolution.weight.detach().squeeze(1)
