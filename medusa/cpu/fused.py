"""A decoder's pass over tree rows as one C++ call, for families with the usual transformer block."""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa.attention import Span, TreePlan
from medusa.base.usual_block import (
    UnusualBlockError,
    check_decoder,
    embedding_scale,
    norms_of,
    rotaries_of,
    shape_of,
)
from medusa.cache import BlockPool
from medusa.cpu import native
from medusa.cpu.int8 import Int8Linear
from medusa.cpu.native import LinearStruct
from medusa.cpu.packed import DTYPE, PANEL, Packed, PackedEmbedding, PackedLinear, struct_of

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Weights(NamedTuple):
    """A linear layer, or some outputs of one."""

    weight: Tensor | Packed
    bias: Tensor | None
    scales: Tensor | None
    inputs: int
    outputs: int

    @property
    def tensors(self) -> list[Tensor | None]:
        """The tensors, which must not move."""
        return [self.weight.parts if isinstance(self.weight, Packed) else self.weight, self.bias, self.scales]

    @property
    def struct(self) -> LinearStruct:
        """The struct for the kernels."""
        if isinstance(self.weight, Packed):
            return self.weight.struct(self.bias)
        return LinearStruct.of(self.weight, self.bias, self.scales, self.inputs, self.outputs)

    def parts(self, sizes: Sequence[int]) -> "list[_Weights]":
        """Split its outputs into separate layers of these sizes."""
        if isinstance(self.weight, Packed) and any(size % PANEL for size in sizes):
            raise UnusualBlockError("several layers are packed as one, and one of them ends within a panel")
        weights, biases, scales = (
            [None] * len(sizes) if whole is None else whole.split(list(sizes)) for whole in self[:3]
        )
        triples = zip(weights, biases, scales, strict=True)
        return [_Weights(*part, self.inputs, size) for part, size in zip(triples, sizes, strict=True)]


class _Block(ctypes.Structure):
    _fields_ = [
        *[(name, LinearStruct) for name in ("query", "key", "value", "output", "gate", "up", "down")],
        *[
            (name, _POINTER)
            for name in ("norm", "after", "mlp_norm", "mlp_after", "query_norm", "key_norm", "token_norm")
        ],
        *[(name, _INT) for name in ("whole_norms", "rotary", "window", "chunk", "tap")],
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *[
            (name, _INT)
            for name in (
                "number_type", "int8", "threads", "batch", "hidden", "inner", "heads", "kv_heads", "dim", "rotated",
                "layers", "width", "context", "rounds_once", "gelu", "wide_angles",
            )
        ],
        *[(name, _FLOAT) for name in ("epsilon", "offset", "scaling", "softcap", "residual", "multiplier")],
        *[(name, _POINTER) for name in ("lengths", "tokens", "parents", "skipped", "firsts")],
        ("computed", _INT), ("together", _INT),
        ("table", _POINTER), ("table_stride", _INT), ("table_rows", _INT),
        *[
            (name, _POINTER)
            for name in ("cosines", "sines", "norm")
        ],
        ("embeddings", LinearStruct),
        *[(name, _POINTER) for name in ("states", "out", "blocks", "keys", "values")],
    ]  # fmt: skip


class FusedPass:
    """The pass of one decoder. Weights are read in place and must not move.

    Args:
        decoder: The layers between token ids and the output layer, on a CPU.
        taps: Layers, counted from 1, whose outputs follow the last hidden state.
        spans: Windows and chunks by layer index; a layer that is missing sees all earlier positions.
        context_length: Positions beyond it, of drafts that can no longer be emitted, are replaced by its last one.

    Raises:
        UnusualBlockError: The layers are of another kind, or contain parts that the kernel does not support.
    """

    def __init__(
        self, decoder: Any, taps: Sequence[int], spans: Mapping[int | None, Span], context_length: int
    ) -> None:
        check_decoder(decoder)
        if not native.available():
            raise UnusualBlockError("there are no C++ kernels here")
        self._decoder, self._alive = decoder, list[Tensor]()
        layers = list(decoder.layers)
        self._shape, self._dtype = _shape(decoder, layers[0]), decoder.norm.weight.dtype
        self._int8 = isinstance(layers[0].mlp.down_proj, Int8Linear)
        self._blocks = (_Block * len(layers))(*[self._read(layer) for layer in layers])
        self._rotaries, kinds = rotaries_of(decoder)
        for place, layer in enumerate(taps):
            self._blocks[layer - 1].tap = (1 + place) * self._shape["hidden"]
        for index, block in enumerate(self._blocks):
            window, chunk = spans.get(index, Span())
            block.window, block.chunk, block.rotary = window or 0, chunk or 0, kinds[index]
        embeddings, scale = self._embeddings()
        self._shape["multiplier"] *= scale
        self._keep([*embeddings.tensors, decoder.norm.weight])
        self._fixed = _Pass(
            number_type=native.number_type(self._dtype), int8=self._int8, layers=len(layers),
            context=context_length, width=self._shape["hidden"] * (1 + len(taps)),
            norm=decoder.norm.weight.data_ptr(),
            embeddings=embeddings.struct, blocks=ctypes.addressof(self._blocks), **self._shape,
        )  # fmt: skip
        self._arenas = _Arenas(len(layers), self._shape["kv_heads"], self._shape["dim"], self._dtype)

    def __call__(self, pool: BlockPool, plan: TreePlan) -> Tensor:
        """Hidden states [R, F] of a pass's rows; their keys and values go into the pool.

        Raises:
            IndexError: A token is not in the vocabulary.
        """
        angles = [rotary.tables(plan.kv_length, self._decoder.norm.weight) for rotary in self._rotaries]
        return _run(self._fixed, self._dtype, plan, angles, *self._arenas(pool))

    def _embeddings(self) -> tuple[_Weights, float]:
        """The embeddings, and a factor on them."""
        layer = self._decoder.embed_tokens
        if isinstance(layer, PackedEmbedding) and self._dtype == DTYPE:
            factor = 1.0 if layer.scale is None else float(layer.scale)
            return _Weights(layer.packed, None, None, layer.packed.inputs, layer.packed.outputs), factor
        scale, weight = embedding_scale(layer), layer.weight
        if type(weight) is not nn.Parameter or weight.dtype != self._dtype or not weight.is_contiguous():
            raise UnusualBlockError(f"its embeddings are of {weight.dtype}, in another layout or of another class")
        return _Weights(weight.detach(), None, None, layer.embedding_dim, layer.num_embeddings), scale

    def _read(self, layer: Any) -> _Block:
        """Pointers to a layer's weights."""
        attention, mlp, shape = layer.self_attn, layer.mlp, self._shape
        queries, keys = shape["heads"] * shape["dim"], shape["kv_heads"] * shape["dim"]
        joined = hasattr(attention, "qkv_proj"), hasattr(mlp, "gate_up_proj")
        heads = (
            _whole(attention.qkv_proj).parts((queries, keys, keys))
            if joined[0]
            else [_whole(getattr(attention, f"{name}_proj")) for name in "qkv"]
        )
        gated = (
            _whole(mlp.gate_up_proj).parts((shape["inner"], shape["inner"]))
            if joined[1]
            else [_whole(mlp.gate_proj), _whole(mlp.up_proj)]
        )
        norms = norms_of(layer, self._decoder.norm)
        linears = [*heads, _whole(attention.o_proj), *gated, _whole(mlp.down_proj)]
        for head, size in zip(heads, (queries, keys, keys), strict=True):
            if (head.outputs, head.inputs) != (size, shape["hidden"]):
                raise UnusualBlockError("its heads are not those of the other layers")
        own = [one.weight for one in linears if not self._int8]
        plain = [*own, *(one.bias for one in linears), *norms]
        dtypes = {DTYPE if isinstance(one, Packed) else one.dtype for one in plain if one is not None}
        if dtypes != {self._dtype}:
            raise UnusualBlockError("its weights are of several dtypes")
        if any((one.scales is not None) != self._int8 for one in linears):
            raise UnusualBlockError("some of its weights are rounded to 8 bits and others are not")
        tensors = [*(tensor for one in linears for tensor in one.tensors), *norms]
        self._keep(tensors)
        pointers = [None if norm is None else norm.data_ptr() for norm in norms]
        whole = norms.query is not None and norms.query.numel() > shape["dim"]
        return _Block(*(one.struct for one in linears), *pointers, whole_norms=whole)

    def _keep(self, tensors: Sequence[Tensor | None]) -> None:
        """Keep the memory of these tensors alive, even if the module moves."""
        self._alive += [tensor.detach() for tensor in tensors if tensor is not None]


class LayerWeights(NamedTuple):
    """The weights of a layer that reads given hidden states.

    Attributes:
        linears: Query, key, value, output, gate, up and down projections; or only key and value.
        norm: Weight of the norm of hidden states.
        mlp_norm: Weight of the norm before the MLP.
        token_norm: Weight of the norm of embeddings, if queries, keys and values read [norm(embedding); norm(state)].
    """

    linears: Sequence[nn.Linear]
    norm: Tensor
    mlp_norm: Tensor | None = None
    token_norm: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        weights = [linear.weight for linear in self.linears]
        norms = (self.norm, self.mlp_norm, self.token_norm)
        return [tensor.detach() for tensor in (*weights, *norms) if tensor is not None]

    @property
    def struct(self) -> _Block:
        """The struct for the kernel."""
        structs = [LinearStruct.of(linear.weight) for linear in self.linears]
        if len(structs) == 2:
            structs = [LinearStruct(), *structs, *[LinearStruct()] * 4]
        norm, mlp_norm, token_norm = (
            None if norm is None else norm.data_ptr() for norm in (self.norm, self.mlp_norm, self.token_norm)
        )
        return _Block(*structs, norm=norm, mlp_norm=mlp_norm, token_norm=token_norm)


class FusedLayers:
    """A sequence of layers over given hidden states.

    Args:
        layers: Their weights. If layers have only key and value projections, each makes its keys and values from the
            given states, and the states are returned unchanged.
        embeddings: [vocabulary, D], packed or not.
        last_norm: Weight of a norm after the last layer.
        shape: ``heads``, ``kv_heads``, ``dim`` and ``epsilon``.

    Raises:
        UnusualBlockError: The kernel does not support such weights.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        embeddings: Tensor | Packed,
        last_norm: Tensor | None = None,
        **shape: Any,
    ) -> None:
        self._alive = [tensor for layer in layers for tensor in layer.tensors]
        self._alive += [] if last_norm is None else [last_norm.detach()]
        self._embeddings = embeddings
        known = [*self._alive, *([] if isinstance(embeddings, Packed) else [embeddings])]
        dtypes = {tensor.dtype for tensor in known} | ({DTYPE} if isinstance(embeddings, Packed) else set())
        if len(dtypes) > 1 or not all(native.reads(tensor) and tensor.is_contiguous() for tensor in known):
            raise UnusualBlockError("its weights are of several dtypes, or not on a CPU with C++ kernels")
        whole, hidden = len(layers[0].linears) > 2, layers[0].norm.numel()
        inner = layers[0].linears[6].in_features if whole else 0
        self._dtype, self._blocks = layers[0].norm.dtype, (_Block * len(layers))(*(layer.struct for layer in layers))
        self._arenas = _Arenas(len(layers), shape["kv_heads"], shape["dim"], self._dtype)
        shape["heads"] *= whole
        self._fixed = _Pass(
            number_type=native.number_type(self._dtype), layers=len(layers), hidden=hidden, width=hidden, inner=inner,
            context=2**62, scaling=shape["dim"] ** -0.5, residual=1.0, multiplier=1.0,
            norm=None if last_norm is None else last_norm.data_ptr(),
            embeddings=struct_of(embeddings), blocks=ctypes.addressof(self._blocks), **shape,
        )  # fmt: skip

    def __call__(self, pool: BlockPool, plan: TreePlan, angles: tuple[Tensor, Tensor], states_RD: Tensor) -> Tensor:
        """Outputs [R, D]; keys and values are written into the pool.

        Args:
            pool: The pool of these layers.
            plan: The plan of the pass; its tokens are embedded if a layer reads embeddings.
            angles: Cosines and sines [positions, dim].
            states_RD: The hidden states, in the weights' dtype.
        """
        return _run(self._fixed, self._dtype, plan, [angles], *self._arenas(pool), states_RD.contiguous())


class _Arenas:
    """The addresses of the keys and values of a pool's layers.

    Args:
        layers: Number of layers.
        kv_heads: Key heads of a layer.
        dim: Head size.
        dtype: Dtype of keys and values.
    """

    def __init__(self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self._layers, self._like = layers, torch.empty(1, kv_heads, 1, dim, dtype=dtype)
        self._found: tuple[weakref.ref[Tensor], tuple[Any, Any]] | None = None  # for the pool of the last pass

    def __call__(self, pool: BlockPool) -> tuple[Any, Any]:
        """Addresses by layer. They are looked up again if the first layer has moved, since all layers move together."""
        arenas, found = pool.arenas[: self._layers], self._found
        first = arenas[0].keys
        if found is not None and first is not None and found[0]() is first:
            return found[1]
        for arena in arenas:
            if arena.keys is None:
                arena.allocate(pool.cache.blocks, self._like, self._like)
        addresses = _POINTER * len(arenas)
        keys, values = zip(*(arena.buffers for arena in arenas), strict=True)
        pair = addresses(*(x.data_ptr() for x in keys)), addresses(*(x.data_ptr() for x in values))
        self._found = weakref.ref(keys[0]), pair
        return pair


def _run(
    fixed: _Pass, dtype: torch.dtype, plan: TreePlan, angles: Sequence[tuple[Tensor, Tensor]], keys: Any, values: Any,
    states: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run a pass with these fixed arguments; keys and values are addresses by layer."""
    firsts = (_INT * (len(plan.sizes) + 1))(*plan.firsts)
    tokens, parents, lengths = plan.tokens.contiguous(), plan.parents.contiguous(), plan.lengths.contiguous()
    at = _Pass.from_buffer_copy(fixed)  # several threads may decode
    addresses = _POINTER * len(angles)
    cosines, sines = (addresses(*(one.data_ptr() for one in tables)) for tables in zip(*angles, strict=True))
    out = torch.empty(plan.rows, at.width, dtype=dtype)
    at.threads, at.batch = torch.get_num_threads(), len(plan.sizes)
    at.computed, at.together = plan.computed, plan.together
    at.lengths, at.tokens, at.parents = lengths.data_ptr(), tokens.data_ptr(), parents.data_ptr()
    at.firsts, at.keys, at.values = ctypes.addressof(firsts), ctypes.addressof(keys), ctypes.addressof(values)
    at.cosines, at.sines, at.rotated = ctypes.addressof(cosines), ctypes.addressof(sines), angles[0][0].shape[1]
    at.wide_angles = angles[0][0].dtype == torch.float32
    at.out, blocks = out.data_ptr(), plan.table.blocks
    at.skipped = None if plan.skipped is None else plan.skipped.data_ptr()
    at.states = None if states is None else states.data_ptr()
    at.table, at.table_stride, at.table_rows = blocks.data_ptr(), blocks.stride(0), plan.table.size
    native.kernels().medusa_pass(ctypes.byref(at))
    return out


def _shape(decoder: Any, layer: Any) -> dict[str, Any]:
    """The sizes that all layers share."""
    norm = decoder.norm
    if norm.weight.dtype not in native.DTYPES or norm.weight.device.type != "cpu":
        raise UnusualBlockError(f"its weights are {norm.weight.dtype} on {norm.weight.device}")
    return shape_of(decoder) | {"inner": _whole(layer.mlp.down_proj).inputs}


def _whole(linear: Any) -> _Weights:
    if isinstance(linear, Int8Linear):
        return _Weights(linear.rounded, linear.bias, linear.scales, linear.in_features, linear.out_features)
    if isinstance(linear, PackedLinear):
        return _Weights(linear.packed, linear.bias, None, linear.in_features, linear.out_features)
    if not native.is_plain(linear) or not linear.weight.is_contiguous():
        raise UnusualBlockError(f"a linear layer is {type(linear).__name__}")
    return _Weights(linear.weight, linear.bias, None, linear.in_features, linear.out_features)
