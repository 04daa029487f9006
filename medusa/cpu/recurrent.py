"""A draft of recurrent heads as one C++ call (kernels/heads.h), which grows the tree level by level."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from medusa.base.output import Matrices
from medusa.cpu import native
from medusa.cpu.growth import Grown, GrownStruct, Growth, GrowthStruct
from medusa.cpu.native import LinearStruct
from medusa.cpu.packed import DTYPE, Packed, struct_of

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Drafting(ctypes.Structure):
    """``Drafting`` of heads.h."""

    _fields_ = [
        *[(name, _INT) for name in ("number_type", "threads", "batch", "hidden", "taps", "inner", "blocks")],
        ("fusion", LinearStruct), ("into", _POINTER), ("out_of", _POINTER), ("output", LinearStruct),
        ("embeddings", LinearStruct), ("scale", _FLOAT), ("ids", _POINTER),
        ("growth", GrowthStruct),
        *[(name, _POINTER) for name in ("states", "roots", "active", "keys")],
        ("temperature", _FLOAT), ("grown", GrownStruct),
    ]  # fmt: skip


class RecurrentWeights:
    """Weights of frozen heads, of the base's embeddings and of its output layer, in the layout of the kernel.

    Where rows meet packed weights as whole numbers, copies of weights are rounded to 8 bits: half the bytes to read for
    each level. Drafts may change, no text does. A whole vocabulary's output layer is not copied.

    Args:
        blocks: ``ResidualBlock``s: ``inner`` [I, 2 D] and ``outer`` [D, I].
        fusion: [D, F - D]; None if there are no feature layers.
        ends: The base's embeddings, and the rows of its output layer that heads draft.
        ids: int64 [V] tokens of the output layer's columns.
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        fusion: Tensor | None,
        ends: Matrices,
        ids: Tensor,
    ) -> None:
        pairs = [(block.inner, block.outer) for block in blocks]
        self._dtype, self._alive = pairs[0][0].weight.dtype, [ids]
        layers = zip(*((self._struct(layer.weight, layer.bias) for layer in pair) for pair in pairs), strict=True)
        self._into, self._out_of = ((LinearStruct * len(pairs))(*column) for column in layers)
        embeddings = ends.embeddings
        whole = len(ids) == (embeddings.outputs if isinstance(embeddings, Packed) else len(embeddings))
        self._alive.append(embeddings.parts if isinstance(embeddings, Packed) else embeddings.detach())
        self._drafting = _Drafting(
            number_type=native.number_type(self._dtype), hidden=pairs[0][1].out_features,
            inner=pairs[0][0].out_features,
            taps=0 if fusion is None else fusion.shape[1] // len(fusion), blocks=len(pairs),
            fusion=LinearStruct() if fusion is None else self._struct(fusion), into=ctypes.addressof(self._into),
            out_of=ctypes.addressof(self._out_of), output=self._struct(ends.weight, ends.bias, as_it_is=whole),
            embeddings=struct_of(embeddings), scale=ends.scale, ids=ids.data_ptr(),
        )  # fmt: skip

    def _struct(self, weight: Tensor | Packed, bias: Tensor | None = None, as_it_is: bool = False) -> LinearStruct:
        """A layer; its memory is kept alive, because a module that is moved gets new memory."""
        if isinstance(weight, Tensor) and not as_it_is and self._dtype == DTYPE and native.rows_are_whole():
            weight = Packed.rounded(weight.detach()).for_here()
        tensors = [weight.parts if isinstance(weight, Packed) else weight, bias]
        self._alive += [tensor.detach() for tensor in tensors if tensor is not None]
        return struct_of(weight, bias)

    @classmethod
    def fits(cls, tables: Iterable[Tensor | Packed], *tensors: Tensor | None) -> bool:
        """Whether the kernel supports such weights."""
        known = [one for one in (*tables, *tensors) if isinstance(one, Tensor)]
        dtypes = {tensor.dtype for tensor in known} | {DTYPE for table in tables if isinstance(table, Packed)}
        same = len(dtypes) == 1 and dtypes <= set(native.DTYPES)
        return same and all(x.device.type == "cpu" and x.is_contiguous() for x in known) and native.available()

    def drafts(self, growth: Growth) -> "RecurrentDrafts":
        """A drafting function with these weights."""
        return RecurrentDrafts(self, self._drafting, growth)


class RecurrentDrafts:
    """Grows the same trees as ``HeadsDrafter.propose``."""

    def __init__(self, weights: RecurrentWeights, drafting: _Drafting, growth: Growth) -> None:
        self._weights, self._growth = weights, growth  # alive
        self._drafting = _Drafting.from_buffer_copy(drafting)
        self._drafting.growth = self._struct = GrowthStruct.of(growth)

    def __call__(
        self, hidden_BF: Tensor, roots_B: Tensor, active_B: Tensor, keys_BK: Tensor | None, temperature: float
    ) -> Grown:
        """Grow trees below these roots.

        Args:
            hidden_BF: Hidden states that ``DraftHeads.fuse`` reads, in the weights' dtype.
            roots_B: int64 tokens of the roots.
            active_B: bool, whether a sequence still grows.
            keys_BK: int64 ``medusa.noise.keys`` of the draws at each level, which the drafted tokens should match; None
                = no draws.
            temperature: Temperature of these draws.
        """
        hidden, roots, active = (x.contiguous() for x in (hidden_BF, roots_B, active_B))
        keys = None if keys_BK is None else keys_BK.contiguous()
        batch, room = len(roots), GrownStruct.room(len(roots), self._growth.nodes)
        at = _Drafting.from_buffer_copy(self._drafting)  # several threads may draft
        at.threads, at.batch, at.states, at.roots = torch.get_num_threads(), batch, hidden.data_ptr(), roots.data_ptr()
        at.active, at.keys, at.temperature = active.data_ptr(), None if keys is None else keys.data_ptr(), temperature
        at.grown = room
        native.kernels().medusa_draft(ctypes.byref(at))
        return room.read()
