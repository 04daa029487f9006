"""The experts of a mixture on a CPU as one C++ call (kernels/experts.h), for families with transformers' usual experts.

Rows are equal bit by bit in passes of any size. The routers, which choose experts, stay those of the families.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from medusa.base.usual_block import GATES
from medusa.cpu.native import kernels, number_type, reads

IMPLEMENTATION = "medusa"
"""Name among transformers' implementations of experts."""
UNKNOWN = ("has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
"""Marks of experts that the kernel does not know; some are new in transformers."""
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Mixture(ctypes.Structure):
    """``Mixture`` of the kernel."""

    _fields_ = [
        *[(name, _INT) for name in ("number_type", "threads", "rows", "top", "experts", "hidden", "inner")],
        ("gelu", _INT), ("whole_shares", _INT),
        *[(name, _POINTER) for name in ("gate_up", "down", "x", "chosen", "shares", "out")],
    ]  # fmt: skip


def use_experts(model: nn.Module) -> int:
    """Let the kernel compute the experts of a frozen model, in place; returns the number of layers that have some.

    Experts of another kind, and with gradients, stay as they were.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    found = [part for part in model.modules() if are_usual(part)]
    for part in found:
        part.config._experts_implementation_internal = IMPLEMENTATION  # type: ignore[union-attr]
    return len(found)


def are_usual(experts: Any) -> bool:
    """Whether these are experts that the kernel knows."""
    if getattr(type(experts), "_apply_gate", None) is not _default_apply_gate:
        return False
    plain = experts.has_gate and experts.is_concatenated and not any(getattr(experts, name, False) for name in UNKNOWN)
    weights = (experts.gate_up_proj, experts.down_proj) if plain else ()
    known = all(type(one) is nn.Parameter and reads(one) and one.is_contiguous() for one in weights)
    return plain and known and _is_gelu(experts) is not None


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
    x, chosen, shares = hidden_states.contiguous(), top_k_index.long().contiguous(), top_k_weights.float().contiguous()
    (rows, hidden), (experts, inner, _), out = x.shape, self.gate_up_proj.shape, torch.empty_like(x)
    kernels().medusa_experts(ctypes.byref(_Mixture(
        number_type(x.dtype), torch.get_num_threads(), rows, chosen.shape[1], experts, hidden, inner // 2,
        bool(_is_gelu(self)), top_k_weights.dtype != x.dtype, self.gate_up_proj.data_ptr(),
        self.down_proj.data_ptr(), x.data_ptr(), chosen.data_ptr(), shares.data_ptr(), out.data_ptr(),
    )))  # fmt: skip
    return out
