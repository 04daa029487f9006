"""The exact backend: a C++ kernel for CPUs whose results depend only on a row's own text, bit by bit (attention.h).

Results are equal for rows of a tree, of plain decoding, of a prefill in chunks of any size, and of any batch.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.attention.contract import BackendUnavailableError, Scoring, TreePlan
from medusa.cpu import native
from medusa.cpu.build import NativeUnavailableError

_POINTER, _FLOAT, _INT, _LONG = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64


class _Layer(ctypes.Structure):
    """``Layer`` of attention.h."""

    _fields_ = [
        *[(name, _LONG) for name in ("batch", "heads", "kv_heads", "dim", "dim_v")],
        *[(name, _POINTER) for name in ("lengths", "parents", "firsts")],
        ("computed", _LONG), ("together", _LONG),
        ("table", _POINTER), ("table_stride", _LONG), ("table_size", _LONG),
        *[(name, _LONG) for name in ("window", "chunk", "q_row", "q_head")],
        ("sinks", _POINTER), ("scaling", _FLOAT), ("softcap", _FLOAT),
    ]  # fmt: skip


class _Rows(NamedTuple):
    """A plan in the layout of the kernel."""

    lengths: Tensor
    parents: Tensor
    firsts: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, plan: TreePlan) -> "_Rows":
        tensors = (plan.lengths, plan.parents, torch.tensor(plan.firsts), plan.table.blocks)
        return cls(*(tensor.contiguous() for tensor in tensors))


class ExactAttention:
    """Sums over keys in float32, in order of position, in segments with fixed bounds, up to each sequence's length."""

    name = "exact"
    recordable = False
    dtypes = frozenset(native.DTYPES)

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise BackendUnavailableError(f"attention (exact) works on a CPU only, not on {device}; choose another")
        try:
            self._kernel = native.kernels().medusa_attention
        except NativeUnavailableError as error:
            raise BackendUnavailableError(f"attention (exact): {error}; or choose reference") from error
        native.declare(self._kernel, [_INT, _INT, ctypes.POINTER(_Layer), *[_POINTER] * 4])

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Dtypes that the kernel does not support."""
        known = query.dtype in self.dtypes and query.dtype == key.dtype == value.dtype
        return None if known else f"its kernel does not compute in {query.dtype}"

    def attend(self, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See ``TreeAttention``; sums are in order of position."""
        assert key.is_contiguous() and value.is_contiguous(), "blocks are read whole"
        rows = plan.once(self.name, lambda: _Rows.of(plan))
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        layer = _Layer(
            len(plan.sizes), query.shape[1], key.shape[2], key.shape[3], value.shape[3],
            rows.lengths.data_ptr(), rows.parents.data_ptr(), rows.firsts.data_ptr(), plan.computed, plan.together,
            rows.blocks.data_ptr(), rows.blocks.stride(0), plan.table.size,
            scoring.window or 0, scoring.chunk or 0, query.stride(0), query.stride(1),
            None if sinks is None else sinks.data_ptr(), scoring.scaling, scoring.softcap or 0.0,
        )  # fmt: skip
        out = query.new_empty(*query.shape[:2], value.shape[3])
        self._kernel(
            native.number_type(query.dtype), torch.get_num_threads(), layer, query.data_ptr(), key.data_ptr(),
            value.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out
