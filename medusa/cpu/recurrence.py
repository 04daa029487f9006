"""The kernels of recurrent layers (kernels/recurrence.h); ``medusa.recurrence.rules`` says what they compute."""

import ctypes

import torch
from torch import Tensor

from medusa.cpu.native import addresses, kernels, number_type


class Steps(ctypes.Structure):
    """``Steps`` of recurrence.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("query", "key", "value", "decay", "rate")]


class _Recurring(ctypes.Structure):
    """``Recurring`` of recurrence.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("threads", "texts", "key_heads", "heads", "keys", "values")],
        *[(name, ctypes.c_void_p) for name in ("firsts", "above")],
        ("rows", Steps),
        *[(name, ctypes.c_void_p) for name in ("states", "pasts", "out", "ends")],
    ]


class Filter(ctypes.Structure):
    """``Filter`` of recurrence.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("channels", "width", "silu")],
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
    ]


class _Convolving(ctypes.Structure):
    """``Convolving`` of recurrence.h."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("number_type", "threads", "rows")],
        ("filter", Filter),
        *[(name, ctypes.c_void_p) for name in ("inputs", "taken", "out")],
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
    given = [None if x is None else x.contiguous() for x in (query, key, value, decay, rate)]
    texts, rows, key_heads, keys = key.shape
    place, state = torch.arange(rows), state.contiguous()
    if seen is None:
        above = (place - 1).repeat(texts)
    else:
        above = torch.where(seen & (place < place[:, None]), place, -1).amax(-1).contiguous()
    out = None if query is None else torch.empty_like(value, memory_format=torch.contiguous_format)
    end = None if seen is not None else torch.empty_like(state)
    firsts = (ctypes.c_int64 * (texts + 1))(*range(0, texts * rows + 1, rows))
    states, ends = addresses(state), addresses([None] * texts if end is None else end)
    kernels().medusa_recur(ctypes.byref(_Recurring(
        torch.get_num_threads(), texts, key_heads, value.shape[2], keys, value.shape[3],
        ctypes.addressof(firsts), above.data_ptr(),
        Steps(*(None if x is None else x.data_ptr() for x in given)), ctypes.addressof(states), None,
        None if out is None else out.data_ptr(), ctypes.addressof(ends),
    )))  # fmt: skip
    return out, end


def filter_of(weight_CW: Tensor, bias: Tensor | None, silu: bool) -> tuple[Filter, list[Tensor]]:
    """A convolution for the kernels, and the tensors that must outlive it."""
    weight = weight_CW.T.float().contiguous()
    kept = [weight] if bias is None else [weight, bias.float().contiguous()]
    width, channels = weight.shape
    return Filter(channels, width, silu, *(x.data_ptr() for x in kept)), kept


def convolve(inputs: Tensor, taken: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``medusa.recurrence.rules.convolve`` of inputs for which ``native.reads`` is true."""
    inputs, taken = inputs.contiguous(), taken.contiguous()
    struct, _alive = filter_of(weight, bias, silu)
    out = inputs.new_empty(len(taken), inputs.shape[1])
    kernels().medusa_convolve(ctypes.byref(_Convolving(
        number_type(inputs.dtype), torch.get_num_threads(), len(out), struct,
        inputs.data_ptr(), taken.data_ptr(), out.data_ptr(),
    )))  # fmt: skip
    return out
