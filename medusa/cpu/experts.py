"""The experts of a mixture on a CPU as one C++ call (kernels/experts.h), for families with transformers' usual experts.

Rows are equal bit by bit in passes of any size. The routers, which choose experts, stay those of the families.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from medusa.base.usual_block import GATES
from medusa.cpu.native import LinearStruct, kernels, number_type, reads
from medusa.cpu.packed import DTYPE, Packed, struct_of

IMPLEMENTATION = "medusa"
"""Name among transformers' implementations of experts."""
UNKNOWN = ("has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
"""Marks of experts that the kernel does not know; some are new in transformers."""
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Mixture(ctypes.Structure):
    """``Mixture`` of the kernel."""

    _fields_ = [
        *[(name, LinearStruct) for name in ("gate_up", "down", "router", "gate")],
        *[(name, _INT) for name in ("experts", "top", "gelu", "sigmoid", "normalized", "whole_shares")],
        ("bias", _POINTER), ("scale", ctypes.c_float),
    ]  # fmt: skip


class _Visits(ctypes.Structure):
    """``Visits`` of the kernel."""

    _fields_ = [
        *[(name, _INT) for name in ("number_type", "threads", "rows")],
        ("mixture", Mixture),
        *[(name, _POINTER) for name in ("x", "chosen", "shares", "out")],
    ]


class PackedExperts(nn.Module):
    """Frozen experts, computed by the kernel, whose weights may be packed; the tensors must not move.

    Args:
        gate_up: [E * 2 I, D] gates and up projections of all experts, one after the other.
        down: [E * D, I] down projections.
        experts: E.
        gelu: Gates are GELU, not SiLU.
        dtype: Dtype of rows and outputs; others than bfloat16 only if rows are rounded or weights plain.
    """

    def __init__(
        self, gate_up: Tensor | Packed, down: Tensor | Packed, experts: int, gelu: bool, dtype: torch.dtype = DTYPE
    ) -> None:
        super().__init__()
        self.gate_up, self.down = (
            one.for_here(one.int8) if isinstance(one, Packed) else _frozen(one) for one in (gate_up, down)
        )
        self.experts, self.gelu, self.dtype = experts, gelu, dtype

    @classmethod
    def of(cls, usual: Any, packed: Mapping[str, Packed] | None = None) -> "PackedExperts":
        """Take the place of experts (``are_usual``), with packed weights in place of those of these names."""
        packed = packed or {}
        gate_up = packed.get("gate_up_proj", usual.gate_up_proj.detach().flatten(0, 1))
        down = packed.get("down_proj", usual.down_proj.detach().flatten(0, 1))
        return cls(gate_up, down, len(usual.gate_up_proj), bool(_is_gelu(usual)), usual.gate_up_proj.dtype)

    def rounded(self) -> "PackedExperts":
        """LOSSY: the same experts in 8 bits, see ``medusa.cpu.int8``."""
        weights = [one if isinstance(one, Packed) else Packed.rounded(one) for one in (self.gate_up, self.down)]
        gate_up, down = (one.for_here(int8=True) for one in weights)
        return PackedExperts(gate_up, down, self.experts, self.gelu, self.dtype)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Outputs [R, D] of rows [R, D] of the dtype; see ``experts_forward``. No gradient passes through."""
        if hidden_states.dtype != self.dtype:
            raise RuntimeError(f"rows of {hidden_states.dtype} do not fit experts of {self.dtype}")
        return _mix(hidden_states, top_k_index, top_k_weights, self.struct)

    @property
    def struct(self) -> Mixture:
        """The struct for the kernel, without a router."""
        return Mixture(struct_of(self.gate_up), struct_of(self.down), experts=self.experts, gelu=self.gelu)


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.contiguous(), requires_grad=False)


def use_experts(model: nn.Module) -> int:
    """Let the kernel compute the experts of a frozen model, in place; returns the number of layers that have some.

    Experts of another kind, and with gradients, stay as they were.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    found = [part for part in model.modules() if are_usual(part)]
    for part in found:
        part.config._experts_implementation_internal = IMPLEMENTATION  # type: ignore[union-attr]
    return len(found)


def have_usual_form(experts: Any) -> bool:
    """Whether these are experts that the kernel knows, wherever their weights are."""
    if getattr(type(experts), "_apply_gate", None) is not _default_apply_gate:
        return False
    plain = experts.has_gate and experts.is_concatenated and not any(getattr(experts, name, False) for name in UNKNOWN)
    return plain and _is_gelu(experts) is not None


def are_usual(experts: Any) -> bool:
    """Whether these are experts that the kernel knows and whose weights it reads."""
    weights = (experts.gate_up_proj, experts.down_proj) if have_usual_form(experts) else ()
    return bool(weights) and all(type(one) is nn.Parameter and reads(one) and one.is_contiguous() for one in weights)


def _is_gelu(experts: Any) -> bool | None:
    """Whether gates are GELU; None = they are neither GELU nor SiLU."""
    act = getattr(experts, "act_fn", None)
    return GATES.get("SiLU" if act is silu else type(act).__name__)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Outputs [R, D] of rows [R, D] that visit experts [R, K] with these shares [R, K]; see transformers' interface."""
    grows = torch.is_grad_enabled() and (hidden_states.requires_grad or self.gate_up_proj.requires_grad)
    if grows or not are_usual(self) or hidden_states.dtype != self.gate_up_proj.dtype:
        other: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
        return other
    weights = (LinearStruct.of(weight.flatten(0, 1)) for weight in (self.gate_up_proj, self.down_proj))
    mixture = Mixture(*weights, experts=len(self.gate_up_proj), gelu=bool(_is_gelu(self)))
    return _mix(hidden_states, top_k_index, top_k_weights, mixture)


def _mix(x: Tensor, chosen: Tensor, shares: Tensor, mixture: Mixture) -> Tensor:
    mixture.top, mixture.whole_shares, out = chosen.shape[1], shares.dtype != x.dtype, x.new_empty(x.shape)
    x, chosen, shares = x.contiguous(), chosen.long().contiguous(), shares.float().contiguous()
    kernels().medusa_experts(ctypes.byref(_Visits(
        number_type(x.dtype), torch.get_num_threads(), len(x), mixture,
        x.data_ptr(), chosen.data_ptr(), shares.data_ptr(), out.data_ptr(),
    )))  # fmt: skip
    return out
