"""The experts of a mixture on a CPU as one C++ call (kernels/experts.h).

It serves families with transformers' usual experts, and GPT-OSS. Rows are equal bit by bit in passes of any size. The
routers, which choose experts, stay those of the families.
"""

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from medusa.base.usual_block import GATES
from medusa.cpu.native import LinearStruct, kernels, number_type, reads
from medusa.cpu.packed import DTYPE, Packed, struct_of

IMPLEMENTATION = "medusa"
"""Name among transformers' implementations of experts."""
UNKNOWN = ("has_post_expert_norm", "_is_expert_parallel")
"""Marks of experts that the kernel does not know."""
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Mixture(ctypes.Structure):
    """``Mixture`` of the kernel."""

    _fields_ = [
        *[(name, LinearStruct) for name in ("gate_up", "down", "router", "gate")],
        *[(name, _INT) for name in ("experts", "top", "gelu", "sigmoid", "normalized", "whole_shares")],
        *[(name, _POINTER) for name in ("bias", "scales", "norm", "after", "beside", "router_norm", "router_scale")],
        *[(name, ctypes.c_float) for name in ("scale", "limit", "slope", "router_factor")],
    ]  # fmt: skip


class _Visits(ctypes.Structure):
    """``Visits`` of the kernel."""

    _fields_ = [
        *[(name, _INT) for name in ("number_type", "threads", "rows")],
        ("mixture", Mixture),
        *[(name, _POINTER) for name in ("x", "chosen", "shares", "out")],
    ]


class Gate(NamedTuple):
    """How gates let pass what they let through.

    Attributes:
        gelu: Gates are GELU, not SiLU.
        limit: The size that gates and what they let through are held to; 0 = none. With a limit (GPT-OSS), gates are
            SiLU and what they let through is one more.
        slope: With a limit: a factor on gates in their sigmoid.
    """

    gelu: bool
    limit: float = 0.0
    slope: float = 1.0


class PackedExperts(nn.Module):
    """Frozen experts, computed by the kernel, whose weights may be packed; the tensors must not move.

    Args:
        gate_up: [E * 2 I, D] gates and up projections of all experts, one after the other.
        down: [E * D, I] down projections.
        experts: E.
        gate: Their gates.
        dtype: Dtype of rows and outputs; others than bfloat16 only if rows are rounded or weights plain.
        biases: [E * 2 I] and [E * D], if they have them.
    """

    def __init__(
        self,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        experts: int,
        gate: Gate,
        dtype: torch.dtype = DTYPE,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        super().__init__()
        self.gate_up, self.down = (
            one.for_here(one.int8) if isinstance(one, Packed) else _frozen(one) for one in (gate_up, down)
        )
        self.experts, self.gate, self.dtype, self.biases = experts, gate, dtype, biases

    @classmethod
    def of(cls, theirs: Any, packed: Mapping[str, Packed] | None = None) -> "PackedExperts":
        """Take the place of experts (``are_known``), with packed weights in place of those of these names.

        Packed weights are in the kernel's order. Others are copied if theirs is another one.
        """
        packed, gate = packed or {}, _gate_of(theirs)
        assert gate is not None, "are_known"
        gate_up, down = (packed.get(name) or _ordered(theirs, name) for name in ("gate_up_proj", "down_proj"))
        of_up, of_down = (
            _ordered(theirs, f"{name}_proj_bias") if theirs.has_bias else None for name in ("gate_up", "down")
        )
        return cls(gate_up, down, len(theirs.gate_up_proj), gate, theirs.gate_up_proj.dtype, (of_up, of_down))

    def rounded(self) -> "PackedExperts":
        """LOSSY: the same experts in 8 bits, see ``medusa.cpu.int8``."""
        weights = [one if isinstance(one, Packed) else Packed.rounded(one) for one in (self.gate_up, self.down)]
        gate_up, down = (one.for_here(int8=True) for one in weights)
        return PackedExperts(gate_up, down, self.experts, self.gate, self.dtype, self.biases)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Outputs [R, D] of rows [R, D] of the dtype; see ``experts_forward``. No gradient passes through."""
        if hidden_states.dtype != self.dtype:
            raise RuntimeError(f"rows of {hidden_states.dtype} do not fit experts of {self.dtype}")
        return _mix(hidden_states, top_k_index, top_k_weights, self.struct)

    @property
    def struct(self) -> Mixture:
        """The struct for the kernel, without a router."""
        gate_up, down = map(struct_of, (self.gate_up, self.down), self.biases)
        return Mixture(gate_up, down, experts=self.experts, **self.gate._asdict())


def _ordered(experts: Any, name: str) -> Tensor:
    """A parameter in the kernel's order, one expert's outputs after the other's: [E * O, I], or [E * O] of a bias."""
    whole: Tensor = getattr(experts, name).detach()
    if in_order(experts):
        return whole.flatten(0, 1)
    turned, found = _turned(experts, whole), whole.new_empty(shape_in_order(experts, name))
    for one, to in zip(whole, found, strict=True):  # torch turns a matrix much faster than several
        one = one.T.contiguous() if turned else one
        if name.startswith("gate_up") and not experts.is_concatenated:
            half = len(one) // 2
            to[:half], to[half:] = one[::2], one[1::2]
        else:
            to.copy_(one)
    return found.flatten(0, 1)


def shape_in_order(module: Any, name: str) -> torch.Size:
    """The shape of a module's parameter, and of one of experts in the kernel's order: [E, O, I] of a weight."""
    whole: Tensor = getattr(module, name)
    return whole.mT.shape if _turned(module, whole) else whole.shape


def in_own_order(module: Any, name: str, ordered: Tensor) -> Tensor:
    """A module's parameter as the module holds it, from one in the kernel's order (``shape_in_order``)."""
    if getattr(module, "is_concatenated", True) is False and name.startswith("gate_up"):
        ordered = ordered.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return ordered.mT.contiguous() if _turned(module, getattr(module, name)) else ordered


def _turned(experts: Any, whole: Tensor) -> bool:
    """Whether experts hold the matrices of this parameter as [I, O]."""
    return have_known_form(experts) and experts.is_transposed and whole.dim() == 3


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.contiguous(), requires_grad=False)


def use_experts(model: nn.Module) -> int:
    """Let the kernel compute the experts of a frozen model, in place; returns the number of layers that have some.

    Experts whose weights are in another order than the kernel's (GPT-OSS) are replaced, one layer after the other.
    Experts of another kind, and usual ones with gradients, stay as they were.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    found = [path for path, part in model.named_modules() if are_known(part)]
    for path in found:
        experts: Any = model.get_submodule(path)
        if in_order(experts):
            experts.config._experts_implementation_internal = IMPLEMENTATION
        else:
            model.set_submodule(path, PackedExperts.of(experts))
    return len(found)


def have_known_form(experts: Any) -> bool:
    """Whether these are experts that the kernel knows, wherever their weights are."""
    return _gate_of(experts) is not None


def are_known(experts: Any) -> bool:
    """Whether these are experts that the kernel knows and whose weights it reads."""
    weights = (experts.gate_up_proj, experts.down_proj) if have_known_form(experts) else ()
    return bool(weights) and all(type(one) is nn.Parameter and reads(one) and one.is_contiguous() for one in weights)


def in_order(experts: Any) -> bool:
    """Whether the kernel reads the weights where they are."""
    return experts.is_concatenated and not experts.is_transposed and not experts.has_bias


def _gate_of(experts: Any) -> Gate | None:
    """The gates of experts; None if these, or more of them, are of another kind."""
    apply = getattr(type(experts), "_apply_gate", None)
    if apply is None or not experts.has_gate or any(getattr(experts, name, False) for name in UNKNOWN):
        return None
    if apply is _default_apply_gate:
        act = getattr(experts, "act_fn", None)
        gelu = GATES.get("SiLU" if act is silu else type(act).__name__)
        return None if gelu is None else Gate(gelu)
    limit, slope = (getattr(experts, name, None) for name in ("limit", "alpha"))
    if not limit or slope is None or experts.is_concatenated:
        return None
    tried = torch.linspace(-2 * limit, 2 * limit, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    gates, ups = tried[::2].clamp(max=limit), tried[1::2].clamp(-limit, limit)
    same = torch.allclose(apply(experts, tried), gates * torch.sigmoid(slope * gates) * (ups + 1))
    return Gate(False, float(limit), float(slope)) if same else None


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Outputs [R, D] of rows [R, D] that visit experts [R, K] with these shares [R, K]; see transformers' interface."""
    grows = torch.is_grad_enabled() and (hidden_states.requires_grad or self.gate_up_proj.requires_grad)
    gate = None if grows or not are_known(self) or not in_order(self) else _gate_of(self)
    if gate is None or hidden_states.dtype != self.gate_up_proj.dtype:
        other: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
        return other
    weights = (LinearStruct.of(weight.flatten(0, 1)) for weight in (self.gate_up_proj, self.down_proj))
    mixture = Mixture(*weights, experts=len(self.gate_up_proj), **gate._asdict())
    return _mix(hidden_states, top_k_index, top_k_weights, mixture)


def _mix(x: Tensor, chosen: Tensor, shares: Tensor, mixture: Mixture) -> Tensor:
    mixture.top, mixture.whole_shares, out = chosen.shape[1], shares.dtype != x.dtype, x.new_empty(x.shape)
    x, chosen, shares = x.contiguous(), chosen.long().contiguous(), shares.float().contiguous()
    kernels().medusa_experts(ctypes.byref(_Visits(
        number_type(x.dtype), torch.get_num_threads(), len(x), mixture,
        x.data_ptr(), chosen.data_ptr(), shares.data_ptr(), out.data_ptr(),
    )))  # fmt: skip
    return out
