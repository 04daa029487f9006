"""The exact backend: a C++ kernel for CPUs whose sums depend on a row's own text alone, bit by bit (attention.h).

Rows of a tree, of plain decoding, of a prefill in chunks of any size and of any batch come out equal.
"""

import ctypes

import torch
from torch import Tensor

from medusa.attention.contract import BackendUnavailableError, Scoring, TreePlan
from medusa.cpu import native
from medusa.cpu.build import NativeUnavailableError

NUMBERS = ctypes.c_int64 * 20
_POINTER, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_float, ctypes.c_int


class ExactAttention:
    """Keys summed in order of position, in blocks with fixed borders, in float32; each sequence to its own length."""

    name = "exact"
    recordable = False
    dtypes = frozenset(native.DTYPES)

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise BackendUnavailableError(f"attention (exact) is a CPU's, not for {device}; choose another")
        try:
            self._kernel = native.kernels().medusa_attention
        except NativeUnavailableError as error:
            raise BackendUnavailableError(f"attention (exact): {error}; or choose reference") from error
        native.declare(self._kernel, [_INT, _INT, NUMBERS, *[_POINTER] * 8, _FLOAT, _FLOAT])

    def objection(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> str | None:
        """Dtypes that the kernel does not know."""
        known = query.dtype in self.dtypes and query.dtype == key.dtype == value.dtype
        return None if known else f"its kernel does not compute in {query.dtype}"

    def attend(self, plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See ``TreeAttention.attend``; the result is a transposed view of [B, N, H, Dv]."""
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        (batch, heads, nodes, dim), dim_v, parents = query.shape, value.shape[-1], plan.draft.parents
        parents = parents if parents.stride(-1) == 1 else parents.contiguous()
        lengths, table = plan.lengths.contiguous(), plan.table
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        out = query.new_empty(batch, nodes, heads, dim_v)
        numbers = NUMBERS(
            batch, heads, key.shape[1], nodes, dim, dim_v, scoring.window or 0, scoring.chunk or 0,
            parents.stride(0), *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            0 if table is None else table.rows, 0 if table is None else table.blocks.stride(0),
        )  # fmt: skip
        self._kernel(
            native.number_type(query.dtype), torch.get_num_threads(), numbers, lengths.data_ptr(), parents.data_ptr(),
            None if table is None else table.blocks.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(),
            out.data_ptr(), None if sinks is None else sinks.data_ptr(), scoring.scaling, scoring.softcap or 0.0,
        )  # fmt: skip
        return out.transpose(1, 2)
