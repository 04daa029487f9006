"""The C++ pass over tree rows (``kernels/pass.h``): its arguments, and a call."""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa.attention import TreePlan
from medusa.base.usual_block import UnusualBlockError
from medusa.cache import BlockPool
from medusa.cpu import native
from medusa.cpu.native import LinearStruct, addresses

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Block(ctypes.Structure):
    """The weights of a layer, and how it attends: ``Block`` of the kernel."""

    _fields_ = [
        *[
            (name, LinearStruct)
            for name in (
                "query", "key", "value", "more", "output", "gate", "up", "down", "input_gate", "input_projection"
            )
        ],
        *[
            (name, _POINTER)
            for name in (
                "norm", "after", "mlp_norm", "mlp_after", "query_norm", "key_norm", "value_norm", "input_norm",
                "token_norm", "sinks", "mixer", "mixture",
            )
        ],
        *[(name, _INT) for name in ("gates", "whole_norms", "rotary", "window", "chunk", "tap", "kv_heads", "dim")],
        ("scale", _FLOAT),
    ]  # fmt: skip


class LayerInputs(ctypes.Structure):
    """What makes per-layer embeddings: ``LayerInputs`` of the kernel."""

    _fields_ = [
        ("embeddings", LinearStruct), ("projection", LinearStruct), ("norm", _POINTER), ("size", _INT),
        ("multiplier", _FLOAT), ("scale", _FLOAT), ("share", _FLOAT),
    ]  # fmt: skip


class Pass(ctypes.Structure):
    """All arguments of a pass: ``Pass`` of the kernel."""

    _fields_ = [
        *[
            (name, _INT)
            for name in (
                "number_type", "threads", "batch", "hidden", "heads", "layers", "width", "context", "rounds_once",
                "gelu", "wide_angles", "pairs",
            )
        ],
        *[(name, _FLOAT) for name in ("epsilon", "offset", "scaling", "softcap", "residual", "multiplier")],
        *[(name, _POINTER) for name in ("lengths", "tokens", "parents", "skipped", "firsts")],
        ("computed", _INT), ("together", _INT),
        ("table", _POINTER), ("table_stride", _INT), ("table_rows", _INT),
        *[(name, _POINTER) for name in ("cosines", "sines", "rotated", "query_scales", "norm")],
        ("embeddings", LinearStruct), ("inputs", _POINTER),
        *[(name, _POINTER) for name in ("states", "out", "blocks", "keys", "values", "memories")],
    ]  # fmt: skip


class Arenas:
    """The addresses of the keys and values of a pool's layers.

    Args:
        sizes: Key heads of each layer and their size; None = it has no keys and values of its own.
        dtype: Dtype of keys and values.
        sources: The layers whose keys and values layers read; None = all read their own.
    """

    def __init__(
        self, sizes: Sequence[tuple[int, int] | None], dtype: torch.dtype, sources: Sequence[int] | None = None
    ) -> None:
        self._sources = range(len(sizes)) if sources is None else sources
        self._likes = [None if size is None else torch.empty(1, size[0], 1, size[1], dtype=dtype) for size in sizes]
        self._found: tuple[weakref.ref[Tensor], tuple[Any, Any]] | None = None  # for the pool of the last pass

    def __call__(self, pool: BlockPool) -> tuple[Any, Any]:
        """Addresses by layer. They are looked up again if the first layer has moved, since all layers move together."""
        found = self._found
        arenas = [None if like is None else arena for arena, like in zip(pool.arenas, self._likes, strict=False)]
        first = next((arena.keys for arena in arenas if arena is not None), None)
        if found is not None and first is not None and found[0]() is first:
            return found[1]
        for arena, like in zip(arenas, self._likes, strict=False):
            if arena is not None and like is not None and arena.keys is None:
                arena.allocate(pool.cache.blocks, like, like)
        buffers = [[None, None] if arena is None else arena.buffers for arena in arenas]
        keys, values = zip(*(buffers[source] for source in self._sources), strict=True)
        keys, values = addresses(keys), addresses(values)
        first = next(buffer for buffer, _ in buffers if buffer is not None)
        self._found = weakref.ref(first), (keys, values)
        return keys, values


def one_dtype(weights: Sequence[Tensor], *others: torch.dtype) -> torch.dtype:
    """The dtype of weights that the kernel reads in place, and of others.

    Raises:
        UnusualBlockError: It is not one, or the kernel does not support such weights.
    """
    dtypes = {*others, *(weight.dtype for weight in weights)}
    if len(dtypes) > 1 or not all(native.reads(weight) and weight.is_contiguous() for weight in weights):
        raise UnusualBlockError("its weights are of several dtypes, or not on a CPU with C++ kernels")
    return dtypes.pop()


def run(
    fixed: Pass, dtype: torch.dtype, plan: TreePlan, angles: Sequence[tuple[Tensor, Tensor]], keys: Any, values: Any,
    states: Tensor | None = None, memories: Any = None,
) -> Tensor:  # fmt: skip
    """Run a pass with these fixed arguments; keys and values are addresses by layer, as ``memories`` are structs."""
    firsts = (_INT * (len(plan.sizes) + 1))(*plan.firsts)
    tokens, parents, lengths = plan.tokens.contiguous(), plan.parents.contiguous(), plan.lengths.contiguous()
    at = Pass.from_buffer_copy(fixed)  # several threads may decode
    cosines, sines = (addresses(tables) for tables in zip(*angles, strict=True))
    out = torch.empty(plan.rows, at.width, dtype=dtype)
    at.threads, at.batch = torch.get_num_threads(), len(plan.sizes)
    at.computed, at.together = plan.computed, plan.together
    at.lengths, at.tokens, at.parents = lengths.data_ptr(), tokens.data_ptr(), parents.data_ptr()
    at.firsts, at.keys, at.values = ctypes.addressof(firsts), ctypes.addressof(keys), ctypes.addressof(values)
    rotated = (_INT * len(angles))(*(table.shape[1] for table, _ in angles))
    at.cosines, at.sines, at.rotated = (ctypes.addressof(one) for one in (cosines, sines, rotated))
    at.wide_angles = angles[0][0].dtype == torch.float32
    at.out, blocks = out.data_ptr(), plan.table.blocks
    at.skipped = None if plan.skipped is None else plan.skipped.data_ptr()
    at.states = None if states is None else states.data_ptr()
    at.memories = None if memories is None else ctypes.addressof(memories)
    at.table, at.table_stride, at.table_rows = blocks.data_ptr(), blocks.stride(0), plan.table.size
    native.kernels().medusa_pass(ctypes.byref(at))
    return out
