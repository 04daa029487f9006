"""One level of recurrent heads as one C++ call (kernels/heads.h): block, output layer and the likeliest tokens."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from medusa.cpu import native
from medusa.cpu.native import LinearStruct

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Level(ctypes.Structure):
    _fields_ = [
        *[(name, _INT) for name in ("half", "threads", "rows", "hidden", "inner", "blocks", "width")],
        *[(name, _POINTER) for name in ("into", "out_of")],
        ("output", LinearStruct),
        *[
            (name, _POINTER)
            for name in ("embeddings", "states", "parents", "tokens", "noise")
        ],
        ("nodes", _INT),
        *[(name, _POINTER) for name in ("out", "best", "logprobs")],
    ]  # fmt: skip


class RecurrentLevel:
    """The blocks of frozen heads with both ends of their base; no gradient passes through.

    Args:
        blocks: ``ResidualBlock``s: ``inner`` [I, 2 D] and ``outer`` [D, I].
        embeddings: [vocabulary, D].
        weight: [V, D] of the output layer.
        bias: [V] or None.
    """

    def __init__(self, blocks: Iterable[Any], embeddings: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        pairs = [(block.inner, block.outer) for block in blocks]
        layers = zip(*((LinearStruct.of(layer.weight, layer.bias) for layer in pair) for pair in pairs), strict=True)
        tensors = [weight, bias, *(parameter for pair in pairs for layer in pair for parameter in layer.parameters())]
        # The memory itself: a module that is moved gets new one.
        self._alive = [tensor.detach() for tensor in tensors if tensor is not None]
        self._embeddings = embeddings.detach()
        self._into, self._out_of = ((LinearStruct * len(pairs))(*column) for column in layers)
        self._output, self._inner = LinearStruct.of(weight, bias), pairs[0][0].out_features

    @classmethod
    def fits(cls, *tensors: Tensor | None) -> bool:
        """Whether the kernel knows such weights."""
        known = [tensor for tensor in tensors if tensor is not None]
        same = len({tensor.dtype for tensor in known}) == 1 and known[0].dtype in native.DTYPES
        return same and all(x.device.type == "cpu" and x.is_contiguous() for x in known) and native.available()

    def __call__(
        self, states_BnD: Tensor, parents_Bm: Tensor, tokens_Bm: Tensor, width: int, noise_BV: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``DraftHeads.best``."""
        (batch, before, hidden), (_, nodes) = states_BnD.shape, tokens_Bm.shape
        states, tokens = states_BnD.contiguous(), tokens_Bm.contiguous()
        parents = (parents_Bm + before * torch.arange(batch)[:, None]).contiguous()
        noise = None if noise_BV is None else noise_BV.contiguous()
        out = states.new_empty(batch, nodes, hidden)
        best, logprobs = parents.new_empty(batch, nodes, width), torch.empty(batch, nodes, width)
        level = _Level(
            half=states.dtype == torch.bfloat16, threads=torch.get_num_threads(), rows=batch * nodes, hidden=hidden,
            inner=self._inner, blocks=len(self._into), width=width, into=ctypes.addressof(self._into),
            out_of=ctypes.addressof(self._out_of), output=self._output, embeddings=self._embeddings.data_ptr(),
            states=states.data_ptr(), parents=parents.data_ptr(), tokens=tokens.data_ptr(),
            noise=None if noise is None else noise.data_ptr(), nodes=nodes, out=out.data_ptr(),
            best=best.data_ptr(), logprobs=logprobs.data_ptr(),
        )  # fmt: skip
        native.kernels().medusa_level(ctypes.byref(level))
        return best, logprobs, out
