"""Layers with queries only, as one C++ call: those of Gemma 4's assistants, which read a base's keys and values."""

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from medusa.attention import TreePlan
from medusa.cache import BlockPool
from medusa.cpu import native
from medusa.cpu.native import LinearStruct, addresses
from medusa.cpu.passes import Block, Pass, one_dtype, run

LINEARS = {
    "query": "q_proj", "output": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
}  # fmt: skip
NORMS = {
    "norm": "input_layernorm", "after": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm", "query_norm": "q_norm",
}  # fmt: skip
"""Names of a layer's parts by those of the kernel."""


class FusedQueries:
    """A sequence of such layers over given hidden states.

    Args:
        layers: ``AssistantLayer``, whose weights are read in place and must not move.
        last_norm: The norm after the last layer.
        tokens: [V, A] an embedding of each token.
        heads: Query heads of a layer.

    Raises:
        UnusualBlockError: The kernel does not support such weights.
    """

    def __init__(self, layers: Sequence[Any], last_norm: Any, tokens: Tensor, heads: int) -> None:
        parts = [getattr(layer, name).weight for layer in layers for name in (*LINEARS.values(), *NORMS.values())]
        self._alive = [part.detach() for part in (*parts, last_norm.weight, tokens)]
        self._dtype, self._of_layers = one_dtype(self._alive), [layer.kind for layer in layers]
        self._kinds = list(dict.fromkeys(self._of_layers))
        self._blocks = (Block * len(layers))(*[self._block(layer) for layer in layers])
        self._fixed = Pass(
            number_type=native.number_type(self._dtype), layers=len(layers), hidden=tokens.shape[1],
            width=tokens.shape[1], heads=heads, context=2**62, gelu=1, epsilon=last_norm.eps, scaling=1.0,
            residual=1.0, multiplier=1.0, norm=last_norm.weight.data_ptr(),
            embeddings=LinearStruct.of(self._alive[-1]), blocks=ctypes.addressof(self._blocks),
        )  # fmt: skip

    def __call__(
        self,
        pool: BlockPool,
        sources: dict[str, int],
        plan: TreePlan,
        angles: dict[str, tuple[Tensor, Tensor]],
        states_RA: Tensor,
    ) -> Tensor:
        """Outputs [R, A] of rows that see the cached positions up to their own place.

        Args:
            pool: The base's keys and values.
            sources: The base's layer to read for each kind of attention.
            plan: A tree of one node for each row.
            angles: For each kind, cosines and sines [positions, d], those of a row at the position that the plan says.
            states_RA: What the first layer reads.
        """
        arenas = [pool.arenas[sources[kind]] for kind in self._of_layers]
        for block, arena in zip(self._blocks, arenas, strict=True):
            assert arena.keys is not None, "the base has computed the prompt"
            block.kv_heads = arena.keys.shape[2]
        keys, values = (addresses([arena.buffers[which] for arena in arenas]) for which in (0, 1))
        of_kinds = [angles[kind] for kind in self._kinds]
        return run(self._fixed, self._dtype, plan, of_kinds, keys, values, states_RA.contiguous())

    def _block(self, layer: Any) -> Block:
        linears = {name: LinearStruct.of(getattr(layer, part).weight) for name, part in LINEARS.items()}
        norms = {name: getattr(layer, part).weight.data_ptr() for name, part in NORMS.items()}
        return Block(
            **linears, **norms, dim=layer.size, window=layer.window or 0, rotary=self._kinds.index(layer.kind),
            scale=float(layer.layer_scalar),
        )  # fmt: skip
