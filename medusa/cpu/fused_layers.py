"""Layers over given hidden states as one C++ call: those of attention and block heads."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from medusa.attention import TreePlan
from medusa.base.output import Matrices
from medusa.cache import BlockPool
from medusa.cpu import native
from medusa.cpu.native import LinearStruct
from medusa.cpu.packed import DTYPE, Packed, struct_of
from medusa.cpu.passes import Arenas, Block, Pass, one_dtype, run


class LayerWeights(NamedTuple):
    """The weights of a layer that reads given hidden states.

    Attributes:
        linears: Query, key, value, output, gate, up and down projections; or only key and value.
        norm: Weight of the norm of hidden states.
        mlp_norm: Weight of the norm before the MLP.
        token_norm: Weight of the norm of embeddings, if queries, keys and values read [norm(embedding); norm(state)].
        query_norm: Weight of the norm of queries, head by head.
        key_norm: Weight of that of keys.
        window: Last positions that a row sees; 0 = all.
    """

    linears: Sequence[nn.Linear]
    norm: Tensor
    mlp_norm: Tensor | None = None
    token_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    window: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        parts = [part for linear in self.linears for part in (linear.weight, linear.bias)]
        return [tensor.detach() for tensor in (*parts, *self._norms.values()) if tensor is not None]

    @property
    def _norms(self) -> dict[str, Tensor | None]:
        names = ("norm", "mlp_norm", "token_norm", "query_norm", "key_norm")
        return {name: getattr(self, name) for name in names}

    def struct(self, kv_heads: int, dim: int) -> Block:
        """The struct for the kernel."""
        structs = [LinearStruct.of(linear.weight, linear.bias) for linear in self.linears]
        if len(structs) == 2:
            structs = [LinearStruct(), *structs]
        else:
            structs.insert(3, LinearStruct())
        structs += [LinearStruct()] * (10 - len(structs))
        norms = {name: norm.data_ptr() for name, norm in self._norms.items() if norm is not None}
        return Block(*structs, **norms, window=self.window, kv_heads=kv_heads, dim=dim, scale=1.0)


class FusedLayers:
    """A sequence of layers over given hidden states.

    Args:
        layers: Their weights. If layers have only key and value projections, each makes its keys and values from the
            given states, and the states are returned unchanged.
        ends: The base's weights, whose embeddings a layer may read.
        last_norm: Weight of a norm after the last layer.
        shape: ``heads``, ``kv_heads``, ``dim`` and ``epsilon``.

    Raises:
        UnusualBlockError: The kernel does not support such weights.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        ends: Matrices,
        last_norm: Tensor | None = None,
        **shape: Any,
    ) -> None:
        self._alive = [tensor for layer in layers for tensor in layer.tensors]
        self._alive += [] if last_norm is None else [last_norm.detach()]
        self._embeddings = embeddings = ends.embeddings
        if isinstance(embeddings, Packed):
            self._dtype = one_dtype(self._alive, DTYPE)
        else:
            self._dtype = one_dtype([*self._alive, embeddings])
        whole, hidden = len(layers[0].linears) > 2, layers[0].norm.numel()
        sizes = shape.pop("kv_heads"), shape.pop("dim")
        self._blocks = (Block * len(layers))(*(one.struct(*sizes) for one in layers))
        self._arenas = Arenas([sizes] * len(layers), self._dtype)
        shape["heads"] *= whole
        self._fixed = Pass(
            number_type=native.number_type(self._dtype), layers=len(layers), hidden=hidden, width=hidden,
            context=2**62, scaling=sizes[1] ** -0.5, residual=1.0, multiplier=ends.scale,
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
        return run(self._fixed, self._dtype, plan, [angles], *self._arenas(pool), states_RD.contiguous())
