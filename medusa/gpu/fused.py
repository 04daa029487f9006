"""A decoder's pass over tree rows with few kernels, for families with the usual transformer block (Llama's).

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
from medusa.base.usual_block import UnusualBlockError, check_decoder, norms_of, rotary_of, shape_of
from medusa.cache import BlockPool
from medusa.gpu.kernels import add_norm_kernel, gate_kernel, turn_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GATES = 1024
"""Columns of the MLP that a program computes."""


class _Product(NamedTuple):
    """A linear layer, or several with the same input as one."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class _Layer(NamedTuple):
    """The weights of a layer.

    Attributes:
        heads: Queries, keys and values.
        output: The output of attention.
        gated: Gates and values of the MLP.
        down: The output of the MLP.
        norm: [D] weight of the norm before attention.
        mlp_norm: [D] weight of the norm before the MLP.
        head_norms: [2, d] weights of norms of queries and keys, head by head; None = there are none.
        tap: Place of its output among the hidden states; None = heads do not read it.
    """

    heads: _Product
    output: _Product
    gated: _Product
    down: _Product
    norm: Tensor
    mlp_norm: Tensor
    head_norms: Tensor | None
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
        shape, embeddings, norm = shape_of(decoder), decoder.embed_tokens, decoder.norm.weight
        if type(embeddings) is not nn.Embedding or embeddings.max_norm is not None:
            raise UnusualBlockError(f"its embeddings are {type(embeddings).__name__}")
        placed = {(weight.dtype, weight.device) for weight in decoder.parameters()}
        if len(placed) > 1 or norm.dtype not in DTYPES:
            raise UnusualBlockError("its weights are on several devices, or of a dtype that the kernels do not know")
        self._decoder, self._shape, self._context, self._places = decoder, shape, context_length, len(taps) + 1
        self._rotary = rotary_of(decoder)
        places = {layer: place for place, layer in enumerate(taps, start=1)}
        self._layers = [self._read(layer, places.get(index)) for index, layer in enumerate(decoder.layers, start=1)]

    def __call__(self, pool: BlockPool, plan: TreePlan) -> Tensor:
        """Hidden states [R, F] of a pass's rows; their keys and values go into the pool."""
        rows = plan.positions.clamp(max=self._context - 1), plan.places
        angles = self._rotary.tables(plan.kv_length, self._decoder.norm.weight)
        x_RD: Tensor = self._decoder.embed_tokens(plan.tokens)
        x_RD = x_RD.mul_(self._shape["multiplier"]) if self._shape["multiplier"] != 1 else x_RD
        width = x_RD.shape[1]
        out_RF: Tensor = x_RD.new_empty(len(x_RD), self._places * width)
        added_RD, normed_RD = None, torch.empty_like(x_RD)
        for index, layer in enumerate(self._layers):
            self._add_norm(x_RD, added_RD, layer.norm, normed_RD)
            if index:
                _tap(self._layers[index - 1], x_RD, out_RF)
            joined = layer.heads(normed_RD)
            query_RHd, keys, values = self._turn(joined, layer.head_norms, rows, angles, pool, index)
            window, chunk = plan.span(index)
            mixed_RHd = attend_rows(plan, query_RHd, keys, values, Scoring(self._shape["scaling"], window, chunk=chunk))
            self._add_norm(x_RD, layer.output(mixed_RHd.flatten(1)), layer.mlp_norm, normed_RD)
            added_RD = layer.down(_gate(layer.gated(normed_RD)))
        self._add_norm(x_RD, added_RD, self._decoder.norm.weight, out_RF[:, :width])
        _tap(self._layers[-1], x_RD, out_RF)
        return out_RF

    def _read(self, layer: Any, tap: int | None) -> _Layer:
        attention, mlp, shape = layer.self_attn, layer.mlp, self._shape
        heads = [attention.qkv_proj] if hasattr(attention, "qkv_proj") else [
            getattr(attention, f"{name}_proj") for name in "qkv"
        ]  # fmt: skip
        gated = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
        joined = _joined(heads)
        if len(joined.weight) != (shape["heads"] + 2 * shape["kv_heads"]) * shape["dim"]:
            raise UnusualBlockError("its heads are not those of the other layers")
        norm, mlp_norm, query_norm, key_norm = norms_of(layer, shape["dim"], shape["epsilon"])
        if norm is None or mlp_norm is None or (query_norm is None) != (key_norm is None):
            raise UnusualBlockError("it lacks a norm")
        head_norms = None if query_norm is None or key_norm is None else torch.stack([query_norm, key_norm]).detach()
        output, down = _joined([attention.o_proj]), _joined([mlp.down_proj])
        return _Layer(joined, output, _joined(gated), down, norm, mlp_norm, head_norms, tap)

    def _add_norm(self, x_RD: Tensor, added_RD: Tensor | None, weight: Tensor, out: Tensor) -> None:
        """``x += added``, then ``out = norm(x)``."""
        width = x_RD.shape[1]
        with torch.cuda.device_of(x_RD):
            add_norm_kernel[(len(x_RD),)](
                x_RD, x_RD if added_RD is None else added_RD, weight, out, out.stride(0), self._shape["epsilon"],
                self._shape["residual"], WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=added_RD is not None,
                num_warps=4 if width <= 4096 else 8,
            )  # fmt: skip

    def _turn(
        self, joined: Tensor, norms: Tensor | None, rows: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor],
        pool: BlockPool, index: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Queries [R, H, d], and all keys and values of the layer, to which those of the rows are added.

        Args:
            joined: [R, (H + 2 G) * d] queries, keys and values.
            norms: See ``_Layer.head_norms``.
            rows: int64 [R] positions of the rows, and places of their keys and values.
            angles: Cosines and sines.
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
        with torch.cuda.device_of(joined):
            turn_kernel[(len(joined), heads + 2 * kv_heads)](
                joined, *rows, *angles, self._decoder.norm.weight if norms is None else norms, query, keys, values,
                self._shape["epsilon"],
                HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=triton.next_power_of_2(dim),
                ROTATED=angles[0].shape[1], NORM=norms is not None, num_warps=1,
            )  # fmt: skip
        return query, keys, values


def _gate(joined: Tensor) -> Tensor:
    """silu(gate) * value [R, I] of [R, 2 I]."""
    rows, width = len(joined), joined.shape[1] // 2
    out = joined.new_empty(rows, width)
    with torch.cuda.device_of(joined):
        gate_kernel[(rows, triton.cdiv(width, GATES))](joined, out, WIDTH=width, BLOCK=GATES)
    return out


def _tap(layer: _Layer, x_RD: Tensor, out_RF: Tensor) -> None:
    """Copy the layer's output among the hidden states, if heads read it."""
    if layer.tap is not None:
        width = x_RD.shape[1]
        out_RF[:, layer.tap * width : (layer.tap + 1) * width] = x_RD


def _joined(linears: Sequence[Any]) -> _Product:
    """Several linear layers of one input as one; their weights become parts of one tensor."""
    for linear in linears:
        if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
            raise UnusualBlockError(f"a linear layer is {type(linear).__name__}")
    if len({linear.bias is None for linear in linears}) > 1:
        raise UnusualBlockError("only some of its projections have biases")
    weight = _one([linear.weight for linear in linears])
    return _Product(weight, None if linears[0].bias is None else _one([linear.bias for linear in linears]))


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
