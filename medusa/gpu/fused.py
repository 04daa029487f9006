"""A decoder's pass over tree rows with few kernels, for families with the usual transformer block.

A layer is four matrix products (queries, keys and values are one, gates and values of the MLP another), attention, and
the kernels of ``medusa.gpu.kernels`` between them. transformers' layers start about forty kernels, each of which takes
longer to start than to compute for a few rows.

Legend: R rows, D hidden size, F width of the hidden states, H query heads, G key heads, d head size, I inner size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from medusa.attention import Scoring, TreePlan
from medusa.attention.hook import attend_rows
from medusa.base.uneven_block import head_sizes
from medusa.base.usual_block import (
    BlockNorms,
    UnusualBlockError,
    attention_linears,
    check_decoder,
    embedding_scale,
    last_norm,
    mlp_linears,
    norms_of,
    query_scales_of,
    rotaries_of,
    shape_of,
    turns_pairs,
)
from medusa.cache import BlockPool
from medusa.cpu.packed import PANEL
from medusa.gpu.kernels import add_norm_kernel, gate_kernel, turn_kernel
from medusa.gpu.packed import PackedLinear, product
from medusa.gpu.packed_weight import PackedWeight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GATES = 1024
"""Columns of the MLP that a program computes."""


class _Product(NamedTuple):
    """A linear layer, or several with the same input as one."""

    weight: Tensor | PackedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, PackedWeight):
            return product(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)


class _Products(NamedTuple):
    """Products whose outputs stand side by side: of linear layers that cannot be joined."""

    parts: list[_Product]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


class _Layer(NamedTuple):
    """The weights of a layer.

    Attributes:
        heads: Queries, keys and values.
        output: The output of attention.
        gated: Gates and values of the MLP.
        down: The output of the MLP.
        norms: The weights of norms.
        head_norms: [2 d] weights of norms of queries and keys head by head, or [(H + G) d] over all heads; None = there
            are none.
        rotary: Kind of the positions that turn queries and keys; -1 = none.
        tap: Place of its output among the hidden states; None = heads do not read it.
    """

    heads: _Product | _Products
    output: _Product | _Products
    gated: _Product | _Products
    down: _Product | _Products
    norms: BlockNorms
    head_norms: Tensor | None
    rotary: int
    tap: int | None


class FusedPass:
    """The pass of one decoder. Joined weights are moved once: the modules keep views of them.

    Args:
        decoder: The layers between token ids and the output layer, on one GPU.
        taps: Layers, counted from 1, whose outputs follow the last hidden state.
        context_length: Positions beyond it, of drafts that can no longer be emitted, are replaced by its last one.

    Raises:
        UnusualBlockError: The layers are of another kind.
    """

    def __init__(self, decoder: Any, taps: Sequence[int], context_length: int) -> None:
        check_decoder(decoder)
        shape, self._norm = shape_of(decoder), last_norm(decoder)
        shape["kv_heads"], shape["dim"] = head_sizes(decoder.layers[0].self_attn)
        norm = self._norm.weight
        embedding_scale(decoder.embed_tokens)  # that they are usual ones: the module itself is called
        placed = {(weight.dtype, weight.device) for weight in decoder.parameters()}
        if len(placed) > 1 or norm.dtype not in DTYPES:
            raise UnusualBlockError("its weights are on several devices, or of a dtype that the kernels do not know")
        self._decoder, self._shape, self._context, self._places = decoder, shape, context_length, len(taps) + 1
        self._rotaries, kinds = rotaries_of(decoder)
        self._shape["pairs"] = turns_pairs(decoder, self._rotaries, kinds)
        self._query_scales = query_scales_of(decoder, context_length)
        places = {layer: place for place, layer in enumerate(taps, start=1)}
        self._layers = [
            self._read(layer, kind, places.get(index))
            for index, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True), start=1)
        ]

    def __call__(self, pool: BlockPool, plan: TreePlan) -> Tensor:
        """Hidden states [R, F] of a pass's rows; their keys and values go into the pool."""
        rows = plan.positions.clamp(max=self._context - 1), plan.places
        angles = [rotary.tables(plan.kv_length, self._norm.weight) for rotary in self._rotaries]
        x_RD: Tensor = self._decoder.embed_tokens(plan.tokens)
        x_RD = x_RD.mul_(self._shape["multiplier"]) if self._shape["multiplier"] != 1 else x_RD
        width = x_RD.shape[1]
        out_RF: Tensor = x_RD.new_empty(len(x_RD), self._places * width)
        added_RD, after, normed_RD = None, None, torch.empty_like(x_RD)
        for index, layer in enumerate(self._layers):
            self._add_norm(x_RD, added_RD, after, layer.norms.before, normed_RD)
            if index:
                _tap(self._layers[index - 1], x_RD, out_RF)
            joined = layer.heads(normed_RD)
            query_RHd, keys, values = self._turn(joined, layer, rows, angles, pool, index)
            window, chunk = plan.span(index)
            scoring = Scoring(self._shape["scaling"], window, self._shape["softcap"] or None, chunk=chunk)
            mixed_RHd = attend_rows(plan, query_RHd, keys, values, scoring)
            output_RD = layer.output(mixed_RHd.flatten(1))
            self._add_norm(x_RD, output_RD, layer.norms.after, layer.norms.mlp_before, normed_RD)
            added_RD, after = layer.down(self._gate(layer.gated(normed_RD))), layer.norms.mlp_after
        self._add_norm(x_RD, added_RD, after, self._norm.weight, out_RF[:, :width])
        _tap(self._layers[-1], x_RD, out_RF)
        return out_RF

    def _read(self, layer: Any, rotary: int, tap: int | None) -> _Layer:
        shape, (heads, output), (gated, down) = self._shape, attention_linears(layer.self_attn), mlp_linears(layer)
        joined = _joined(heads)
        if sum(linear.out_features for linear in heads) != (shape["heads"] + 2 * shape["kv_heads"]) * shape["dim"]:
            raise UnusualBlockError("its heads are not those of the other layers")
        norms = norms_of(layer, self._norm)
        head_norms = None if norms.query is None or norms.key is None else torch.cat([norms.query, norms.key]).detach()
        return _Layer(joined, _joined([output]), _joined(gated), _joined([down]), norms, head_norms, rotary, tap)

    def _add_norm(
        self, x_RD: Tensor, added_RD: Tensor | None, after: Tensor | None, before: Tensor | None, out: Tensor
    ) -> None:
        """``x += norm(added)``, then ``out = norm(x)``; None = there is no such norm, or nothing to add."""
        width, shape = x_RD.shape[1], self._shape
        with torch.cuda.device_of(x_RD):
            add_norm_kernel[(len(x_RD),)](
                x_RD, x_RD if added_RD is None else added_RD, x_RD if after is None else after,
                x_RD if before is None else before, out, out.stride(0), shape["epsilon"], shape["offset"],
                shape["residual"], WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=added_RD is not None,
                AFTER=after is not None, BEFORE=before is not None, ONCE=shape["rounds_once"],
                num_warps=4 if width <= 4096 else 8,
            )  # fmt: skip

    def _gate(self, joined: Tensor) -> Tensor:
        """act(gate) * value [R, I] of [R, 2 I]."""
        rows, width = len(joined), joined.shape[1] // 2
        out, gelu = joined.new_empty(rows, width), self._shape["gelu"]
        with torch.cuda.device_of(joined):
            gate_kernel[(rows, triton.cdiv(width, GATES))](joined, out, WIDTH=width, BLOCK=GATES, GELU=gelu)
        return out

    def _turn(
        self, joined: Tensor, layer: _Layer, rows: tuple[Tensor, Tensor], angles: Sequence[tuple[Tensor, Tensor]],
        pool: BlockPool, index: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Queries [R, H, d], and all keys and values of the layer, to which those of the rows are added.

        Args:
            joined: [R, (H + 2 G) * d] queries, keys and values.
            layer: The layer.
            rows: int64 [R] positions of the rows, and places of their keys and values.
            angles: Cosines and sines of each kind of positions.
            pool: The KV cache.
            index: Index of the layer.
        """
        heads, kv_heads, dim = (self._shape[name] for name in ("heads", "kv_heads", "dim"))
        arena = pool.arenas[index]
        if arena.keys is None:
            like = joined.new_empty(1, kv_heads, 1, dim)
            arena.allocate(pool.cache.blocks, like, like)
        keys, values = arena.buffers
        query = joined.new_empty(len(joined), heads, dim)
        norms, kind = layer.head_norms, angles[max(layer.rotary, 0)]
        whole = norms is not None and len(norms) > 2 * dim
        with torch.cuda.device_of(joined):
            turn_kernel[(len(joined), heads + 2 * kv_heads)](
                joined, *rows, *kind, self._norm.weight if norms is None else norms, query, keys, values,
                self._shape["epsilon"], self._shape["offset"],
                HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=triton.next_power_of_2(dim),
                ROTATED=0 if layer.rotary < 0 else kind[0].shape[1], NORM=norms is not None, WHOLE=whole,
                ALL=triton.next_power_of_2(heads * dim), ONCE=self._shape["rounds_once"], PAIRS=self._shape["pairs"],
                num_warps=4 if whole else 1,
            )  # fmt: skip
        if self._query_scales is not None:
            query *= self._query_scales[rows[0], None, None]
        return query, keys, values


def _tap(layer: _Layer, x_RD: Tensor, out_RF: Tensor) -> None:
    """Copy the layer's output among the hidden states, if heads read it."""
    if layer.tap is not None:
        width = x_RD.shape[1]
        out_RF[:, layer.tap * width : (layer.tap + 1) * width] = x_RD


def _joined(linears: Sequence[Any]) -> _Product | _Products:
    """Several linear layers of one input as one; their weights become parts of one tensor, if they are of one kind."""
    layouts = {linear.packed.layout if isinstance(linear, PackedLinear) else None for linear in linears}
    filled = all(linear.out_features % PANEL == 0 for linear in linears[:-1])
    if len(linears) > 1 and (len(layouts) > 1 or (None not in layouts and not filled)):
        return _Products([one for linear in linears if isinstance(one := _joined([linear]), _Product)])
    for linear in linears:
        plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter
        if not plain and not isinstance(linear, PackedLinear):
            raise UnusualBlockError(f"a linear layer is {type(linear).__name__}")
    if len({linear.bias is None for linear in linears}) > 1:
        raise UnusualBlockError("only some of its projections have biases")
    bias = None if linears[0].bias is None else _one([linear.bias for linear in linears])
    if None in layouts:
        return _Product(_one([linear.weight for linear in linears]), bias)
    whole = linears[0].packed if len(linears) == 1 else linears[0].packed.whole
    if whole is None or any(linear.packed.whole is not whole for linear in linears[1:]):
        whole, first = PackedWeight.joined([linear.packed for linear in linears]), 0
        for linear in linears:
            linear.packed = whole.part(first, linear.out_features)
            first += linear.out_features
    return _Product(whole, bias)


@torch.no_grad()
def _one(parts: Sequence[nn.Parameter]) -> Tensor:
    """The parameters as one tensor; they become views of it, unless they are that already."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        at += part.nbytes
    else:
        shape = (sum(map(len, parts)), *first.shape[1:])
        return first.detach().as_strided(shape, first.stride())
    with torch.inference_mode(first.is_inference()):  # the modules' weights stay of their kind
        whole = torch.cat([part.detach() for part in parts])
        for part, piece in zip(parts, whole.split(list(map(len, parts))), strict=True):
            part.data = piece
    return whole
