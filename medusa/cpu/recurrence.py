"""The kernels of recurrent layers (kernels/recurrence.h); ``medusa.recurrence.rules`` says what they compute."""

import ctypes

import torch
from torch import Tensor

from medusa.cpu.native import kernels, number_type


class _Recurring(ctypes.Structure):
    """``Recurring`` of recurrence.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("threads", "texts", "rows", "heads", "keys", "values")],
        *[(name, ctypes.c_void_p) for name in ("query", "key", "value", "decay", "rate", "state", "seen")],
        *[(name, ctypes.c_void_p) for name in ("out", "end")],
    ]


class _Convolving(ctypes.Structure):
    """``Convolving`` of recurrence.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("number_type", "threads", "rows", "channels", "width", "silu")],
        *[(name, ctypes.c_void_p) for name in ("inputs", "taken", "weight", "bias", "out")],
    ]


def recur(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    state: Tensor,
    seen: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """``medusa.recurrence.rules.recur`` of tensors in float32 on a CPU."""
    given = [None if x is None else x.contiguous() for x in (query, key, value, decay, rate, state, seen)]
    out = None if query is None else torch.empty_like(value, memory_format=torch.contiguous_format)
    end = None if seen is not None else torch.empty_like(state, memory_format=torch.contiguous_format)
    texts, rows, heads, keys = key.shape
    kernels().medusa_recur(ctypes.byref(_Recurring(
        torch.get_num_threads(), texts, rows, heads, keys, value.shape[3],
        *(None if x is None else x.data_ptr() for x in (*given, out, end)),
    )))  # fmt: skip
    return out, end


def convolve(inputs: Tensor, taken: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``medusa.recurrence.rules.convolve`` of inputs for which ``native.reads`` is true."""
    inputs, taken = inputs.contiguous(), taken.contiguous()
    weight, bias = weight.T.float().contiguous(), None if bias is None else bias.float().contiguous()
    out = inputs.new_empty(len(taken), inputs.shape[1])
    kernels().medusa_convolve(ctypes.byref(_Convolving(
        number_type(inputs.dtype), torch.get_num_threads(), *out.shape, taken.shape[1], silu,
        inputs.data_ptr(), taken.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )))  # fmt: skip
    return out
