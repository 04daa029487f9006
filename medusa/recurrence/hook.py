"""Lets the recurrent layers of transformers compute trees, without a copy of their code.

Layers of all families call the same few functions of their modelling files, and pass keyword arguments on to them. Our
functions stand in their place: with the plan of a pass they compute its trees, without one they call transformers' own.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from medusa.recurrence.states import RecurrentPass

WHOLE = 64
"""Values that torch's vectors compute together, or a multiple of them."""


def hook(model: nn.Module) -> bool:
    """Put our functions in place for this model's layers; returns whether it has layers that call them.

    Further calls change nothing. The layers of other models of the same family call them too, without a plan.
    """
    # All of them begin with a convolution. A file alone says nothing: a model may have only its attention layers.
    layers = [part for part in model.modules() if any(isinstance(child, nn.Conv1d) for child in part.children())]
    recurrent = False
    for file in {type(layer).__module__ for layer in layers}:
        names = vars(sys.modules[file])
        for name in _OURS.keys() & names.keys():
            recurrent = True
            if not hasattr(names[name], "without_plan"):
                setattr(sys.modules[file], name, _hooked(names[name], _OURS[name]))
            if names.get("F") is functional:
                names["F"] = _Functional()
    return recurrent


def _softplus(x: Tensor) -> Tensor:
    """``softplus`` whose results do not depend on the number of values: torch computes the last few in another way."""
    if not x.is_cpu or not (missing := -x.numel() % WHOLE):
        return functional.softplus(x)
    return functional.softplus(functional.pad(x.flatten(), (0, missing)))[: x.numel()].view_as(x)


class _Functional:
    """``torch.nn.functional`` for the files of these layers, with our ``softplus``."""

    softplus = staticmethod(_softplus)

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


def _hooked(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def call(*args: Any, tree_plan: Any = None, **options: Any) -> Any:
        if tree_plan is None:
            return theirs(*args, **options)
        return ours(tree_plan.recurrent, *args, **options)

    call.without_plan = theirs  # type: ignore[attr-defined]
    return call


def _convolution(
    own: RecurrentPass, hidden: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """``causal_conv1d_fn``: [1, C, R] -> [1, C, R]."""
    out_RC = own.convolve(hidden[0].T, weight, bias, activation == "silu")
    return (out_RC if activation in (None, "silu") else ACT2FN[activation](out_RC)).T[None]


def _delta_rule(
    own: RecurrentPass, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """``chunk_gated_delta_rule``: [1, R, H, D] -> [1, R, H, V], and no state: it is kept by ``own``."""
    query_RHK, key_RHK = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        query_RHK, key_RHK = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query_RHK, key_RHK))
    out_RHV = own.recur(query_RHK * query.shape[-1] ** -0.5, key_RHK, value[0], g[0], beta[0])
    return out_RHV.to(query.dtype)[None], None


def _mamba2(
    own: RecurrentPass, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 0,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """``mamba_chunk_scan_combined``: [1, R, H, V] -> [1, R, H, V], and no state: it is kept by ``own``."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    step_RH = (_softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].float()
    key_RHK, query_RHK = B[0].float(), C[0].float()
    inputs_RHV = hidden_states[0].float()
    out_RHV = own.recur(query_RHK, key_RHK, inputs_RHV * step_RH[..., None], A.float() * step_RH, None)
    if D is not None:
        out_RHV = out_RHV + D[..., None] * inputs_RHV
    return (out_RHV[None], None) if return_final_states else out_RHV[None]


_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
