"""A decoder's pass over tree rows as one C++ call, for families with the usual transformer block."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from medusa.attention import Span, TreePlan
from medusa.base.mixture_block import MixtureParts, mixture_of, routing_of
from medusa.base.recurrent_block import mixer_of
from medusa.base.uneven_block import (
    head_sizes,
    input_linears,
    key_sources,
    layer_inputs_of,
    scale_of,
    shares_keys,
)
from medusa.base.usual_block import (
    SINKS,
    UnusualBlockError,
    attention_layers,
    attention_linears,
    bare_norm_weight,
    check_decoder,
    embedding_scale,
    has_gates,
    last_norm,
    mlp_linears,
    norm_weight,
    norms_of,
    query_scales_of,
    rotaries_of,
    shape_of,
    turns_pairs,
)
from medusa.cache import BlockPool
from medusa.cpu import native
from medusa.cpu.experts import Mixture, PackedExperts, are_known
from medusa.cpu.int8 import Int8Linear
from medusa.cpu.mixers import Memory, Mixer
from medusa.cpu.native import LinearStruct
from medusa.cpu.packed import DTYPE, PANEL, Packed, PackedEmbedding, PackedLinear
from medusa.cpu.passes import Arenas, Block, LayerInputs, Pass, run


class _Weights(NamedTuple):
    """A linear layer, or some outputs of one."""

    weight: Tensor | Packed
    bias: Tensor | None
    inputs: int
    outputs: int

    @property
    def tensors(self) -> list[Tensor | None]:
        """The tensors, which must not move."""
        return [self.weight.parts if isinstance(self.weight, Packed) else self.weight, self.bias]

    @property
    def struct(self) -> LinearStruct:
        """The struct for the kernels."""
        if isinstance(self.weight, Packed):
            return self.weight.struct(self.bias)
        return LinearStruct.of(self.weight, self.bias)

    def parts(self, sizes: Sequence[int]) -> "list[_Weights]":
        """Split its outputs into separate layers of these sizes."""
        if sum(sizes) != self.outputs:
            raise UnusualBlockError("several layers are one, and its parts are of other sizes")
        if isinstance(self.weight, Packed) and any(size % PANEL for size in sizes):
            raise UnusualBlockError("several layers are packed as one, and one of them ends within a panel")
        weights, biases = ([None] * len(sizes) if whole is None else whole.split(list(sizes)) for whole in self[:2])
        return [
            _Weights(weight, bias, self.inputs, size) for weight, bias, size in zip(weights, biases, sizes, strict=True)
        ]


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
        check_decoder(decoder, on_cpu=True)
        if not native.available():
            raise UnusualBlockError("there are no C++ kernels here")
        self._norm, self._alive, self._mixers = last_norm(decoder), list[Tensor](), dict[int, Mixer]()
        self._mixtures, layers = list[Mixture](), list(decoder.layers)
        self._shape, self._dtype = _shape(decoder), self._norm.weight.dtype
        self._int8 = isinstance(attention_linears(attention_layers(decoder)[0].self_attn)[1], Int8Linear)
        self._blocks = (Block * len(layers))(*[self._read(index, layer) for index, layer in enumerate(layers)])
        self._rotaries, kinds = rotaries_of(decoder)
        self._shape["pairs"] = turns_pairs(decoder, self._rotaries, kinds)
        for place, layer in enumerate(taps):
            self._blocks[layer - 1].tap = (1 + place) * self._shape["hidden"]
        for index, block in enumerate(self._blocks):
            window, chunk = spans.get(index, Span())
            block.window, block.chunk, block.rotary = window or 0, chunk or 0, kinds[index]
        embeddings, scale = self._embeddings(decoder.embed_tokens)
        self._shape["multiplier"] *= scale
        scales = query_scales_of(decoder, context_length)
        scales = None if scales is None else scales.float()
        self._keep([*embeddings.tensors, self._norm.weight, scales])
        self._fixed = Pass(
            number_type=native.number_type(self._dtype), layers=len(layers),
            context=context_length, width=self._shape["hidden"] * (1 + len(taps)),
            norm=self._norm.weight.data_ptr(), query_scales=None if scales is None else scales.data_ptr(),
            embeddings=embeddings.struct, blocks=ctypes.addressof(self._blocks), **self._shape,
        )  # fmt: skip
        if (inputs := self._layer_inputs(decoder)) is not None:
            self._inputs = inputs
            self._fixed.inputs = ctypes.addressof(inputs)
        sizes, sources = [(block.kv_heads, block.dim) for block in self._blocks], key_sources(decoder)
        if sources is None or any(sizes[source] != size for source, size in zip(sources, sizes, strict=True)):
            raise UnusualBlockError("a layer shares keys that none keeps in its sizes")
        own = [(block.kv_heads, block.dim) if block.dim and block.key.outputs else None for block in self._blocks]
        self._arenas = Arenas(own, self._dtype, sources)

    def __call__(self, pool: BlockPool, plan: TreePlan) -> Tensor:
        """Hidden states [R, F] of a pass's rows; their keys and values go into the pool.

        Raises:
            IndexError: A token is not in the vocabulary.
        """
        angles = [rotary.tables(plan.kv_length, self._norm.weight) for rotary in self._rotaries]
        if not self._mixers:
            return run(self._fixed, self._dtype, plan, angles, *self._arenas(pool))
        with pool.recurrent.running(plan):
            memories, ends = (Memory * len(self._blocks))(), []
            for index, mixer in self._mixers.items():
                memories[index], keep = mixer.memory(plan.recurrent, plan.rows)
                ends.append(keep)
            out = run(self._fixed, self._dtype, plan, angles, *self._arenas(pool), memories=memories)
            for keep in ends:
                keep()
        return out

    def _embeddings(self, layer: Any) -> tuple[_Weights, float]:
        """The embeddings, and a factor on them."""
        scale = embedding_scale(layer)
        if isinstance(layer, PackedEmbedding) and self._dtype == DTYPE:
            return _Weights(layer.packed, None, layer.packed.inputs, layer.packed.outputs), scale
        weight = layer.weight
        if type(weight) is not nn.Parameter or weight.dtype != self._dtype or not weight.is_contiguous():
            raise UnusualBlockError(f"its embeddings are of {weight.dtype}, in another layout or of another class")
        return _Weights(weight.detach(), None, layer.embedding_dim, layer.num_embeddings), scale

    def _layer_inputs(self, decoder: Any) -> LayerInputs | None:
        """Pointers to what makes per-layer embeddings, of these layers alone."""
        parts, hidden = layer_inputs_of(decoder), self._shape["hidden"]
        pairs = [(block.input_gate, block.input_projection) for block in self._blocks]
        sizes = {(gate.inputs, gate.outputs, up.inputs, up.outputs) for gate, up in pairs}
        if parts is None and sizes == {(0, 0, 0, 0)}:
            return None
        if parts is None or sizes != {(hidden, parts.size, parts.size, hidden)}:
            raise UnusualBlockError("its layers read per-layer embeddings of other sizes")
        embeddings, multiplier = self._embeddings(parts.embeddings)
        projection, norm = _whole(parts.projection), norm_weight(parts.norm, self._norm)
        needed, all_layers = parts.size * len(self._blocks), projection.outputs
        if not needed <= all_layers == embeddings.inputs or projection.inputs != hidden or norm.numel() != parts.size:
            raise UnusualBlockError("its per-layer embeddings are of other sizes")
        if needed < all_layers:
            projection, _ = projection.parts((needed, all_layers - needed))
        self._check([projection.weight], [projection.bias, norm])
        self._keep([*embeddings.tensors, *projection.tensors, norm])
        return LayerInputs(
            embeddings.struct, projection.struct, norm.data_ptr(), parts.size, multiplier, parts.scale, parts.share
        )

    def _read(self, index: int, layer: Any) -> Block:
        """Pointers to a layer's weights."""
        mixer, mixture, (gated, down) = mixer_of(layer), mixture_of(layer), mlp_linears(layer)
        if mixer is None:
            heads, output = self._heads(layer.self_attn)
        else:
            heads, output = [_whole(linear) for linear in mixer.inputs], mixer.output
        norms, mlp = norms_of(layer, self._norm), self._mlp(gated, down) if gated else []
        gates = mixer is None and has_gates(layer.self_attn)
        if norms.after is not None and (gates or mixer is not None):
            raise UnusualBlockError("a norm follows a recurrent layer, or gates of attention")
        groups = heads, [_whole(output)], mlp, [_whole(linear) for linear in input_linears(layer)]
        linears = [linear for group in groups for linear in group]
        others = () if mixer is None else (mixer.filter, mixer.norm)
        self._check([one.weight for one in linears], [*(one.bias for one in linears), *norms, *others])
        tensors = [*(tensor for one in linears for tensor in one.tensors), *norms]
        self._keep(tensors)
        pointers = [None if norm is None else norm.data_ptr() for norm in norms]
        structs = [
            struct
            for group, room in zip(groups, (4, 1, 3, 2), strict=True)
            for struct in [*(one.struct for one in group), *[LinearStruct()] * (room - len(group))]
        ]
        block = Block(*structs, *pointers, gates=gates, scale=scale_of(layer))
        if (sinks := getattr(getattr(layer, "self_attn", None), SINKS, None)) is not None:
            self._keep([sinks := sinks.detach().float()])
            block.sinks = sinks.data_ptr()
        if mixer is None:
            block.kv_heads, block.dim = head_sizes(layer.self_attn)
            block.whole_norms = norms.query is not None and norms.query.numel() > block.dim
        else:
            self._mixers[index] = Mixer(index, mixer)
            block.mixer = ctypes.addressof(self._mixers[index].struct)
        if mixture is not None:
            if norms.mlp_before is None:
                raise UnusualBlockError("no norm stands before its experts")
            self._mixtures.append(self._mixture(mixture))
            block.mixture = ctypes.addressof(self._mixtures[-1])
        return block

    def _mixture(self, parts: MixtureParts) -> Mixture:
        """Pointers to the weights of a layer's experts."""
        experts, routing = parts.experts, routing_of(parts)
        if routing is None:
            raise UnusualBlockError(f"its router is {type(parts.router).__name__}")
        if not isinstance(experts, PackedExperts):
            if not are_known(experts):
                raise UnusualBlockError(f"its experts are {type(experts).__name__}")
            experts = PackedExperts.of(experts)
        gate, bias = (
            None if parts.gate is None else _whole(parts.gate),
            None if parts.bias is None else parts.bias.float(),
        )
        router = parts.scores.weight, getattr(parts.scores, "bias", None)
        weights, plain = [experts.gate_up, experts.down], [*router, *experts.biases, *(gate.tensors if gate else ())]
        self._check(weights, plain)
        self._keep([bias, *plain, *(one.parts if isinstance(one, Packed) else one for one in weights)])
        struct = experts.struct
        struct.router = LinearStruct.of(*router)
        struct.gate = LinearStruct() if gate is None else gate.struct
        struct.bias = None if bias is None else bias.data_ptr()
        struct.sigmoid, struct.normalized, struct.whole_shares, struct.scale, struct.top = routing
        if parts.norms:
            self._beside(parts, struct)
        sizes = [(one.experts, one.top, one.gate_up.outputs, one.down.inputs) for one in [struct, *self._mixtures]]
        if len(set(sizes)) > 1:
            raise UnusualBlockError("its layers have experts of several sizes")
        return struct

    def _beside(self, parts: MixtureParts, struct: Mixture) -> None:
        """Complete a mixture that stands beside an MLP: its norms, and what its router does with the residual."""
        router, scales = parts.router, parts.router.per_expert_scale.float()
        plain = [norm_weight(norm, self._norm) for norm in parts.norms]
        plain += [bare_norm_weight(router.norm, self._shape["hidden"], self._norm), router.scale]
        self._check([], plain)
        self._keep([scales, *plain])
        struct.norm, struct.after, struct.beside, struct.router_norm, struct.router_scale = (
            one.data_ptr() for one in plain
        )
        struct.router_factor, struct.scales = float(router.scalar_root_size), scales.data_ptr()

    def _heads(self, attention: Any) -> tuple[list[_Weights], Any]:
        """The projections to queries, keys and values, and the last one."""
        (kv_heads, dim), (linears, output) = head_sizes(attention), attention_linears(attention)
        keys = kv_heads * dim
        sizes = (1 + has_gates(attention)) * self._shape["heads"] * dim, keys, keys
        if len(linears) == 1 and not shares_keys(attention):
            return _whole(linears[0]).parts(sizes), output
        heads = [_whole(linear) for linear in linears]
        expected = [(size, self._shape["hidden"]) for size in sizes[: len(heads)]]
        if [(one.outputs, one.inputs) for one in heads] != expected:
            raise UnusualBlockError("its heads are of other sizes than its config says")
        return heads, output

    def _mlp(self, gated: Sequence[Any], down: Any) -> list[_Weights]:
        """The projections to gates and to what they let through, and the last one."""
        last = _whole(down)
        ups = _whole(gated[0]).parts([last.inputs] * 2) if len(gated) == 1 else [_whole(linear) for linear in gated]
        if any(one.outputs != last.inputs for one in ups):
            raise UnusualBlockError("its MLP's parts do not fit")
        return [*ups, last]

    def _check(self, weights: Sequence[Tensor | Packed], others: Sequence[Tensor | None]) -> None:
        """Check that weights are rounded to 8 bits all or not at all, and that the rest is of the pass's dtype."""
        plain = others if self._int8 else [*weights, *others]
        dtypes = {DTYPE if isinstance(one, Packed) else one.dtype for one in plain if one is not None}
        if dtypes != {self._dtype}:
            raise UnusualBlockError("its weights are of several dtypes")
        if any((isinstance(one, Packed) and one.int8) != self._int8 for one in weights):
            raise UnusualBlockError("some of its weights are rounded to 8 bits and others are not")

    def _keep(self, tensors: Sequence[Tensor | None]) -> None:
        """Keep the memory of these tensors alive, even if the module moves."""
        kept = [tensor.detach() for tensor in tensors if tensor is not None]
        if any(not tensor.is_cpu for tensor in kept):
            raise UnusualBlockError("some of its weights are on a disk or another device")
        self._alive += kept


def _shape(decoder: Any) -> dict[str, Any]:
    """The sizes that all layers share."""
    norm = last_norm(decoder)
    if norm.weight.dtype not in native.DTYPES or norm.weight.device.type != "cpu":
        raise UnusualBlockError(f"its weights are {norm.weight.dtype} on {norm.weight.device}")
    return shape_of(decoder)


def _whole(linear: Any) -> _Weights:
    if isinstance(linear, PackedLinear):
        return _Weights(linear.packed, linear.bias, linear.in_features, linear.out_features)
    if not native.is_plain(linear) or not linear.weight.is_contiguous():
        raise UnusualBlockError(f"a linear layer is {type(linear).__name__}")
    return _Weights(linear.weight, linear.bias, linear.in_features, linear.out_features)
