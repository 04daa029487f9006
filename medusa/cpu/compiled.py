"""Functions of a decode step compiled to one graph each (``torch.compile``), without Python between their operators.

A small model's step on a CPU is mostly Python and the dispatch of hundreds of small operators. What a compiler cannot
or need not see stays an opaque operator: packed linear layers (``medusa::packed_linear``), and attention with its
cache (``medusa::tree_attention``), so that one graph serves every cached length.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import pad

from medusa.attention import AMBIENT, Scoring, TreePlan
from medusa.attention.hook import attend_rows
from medusa.base.taps import DecoderPass
from medusa.cache import SlotCache
from medusa.cpu import packed
from medusa.cpu.header_cache import keep_headers_in_cache

logger = logging.getLogger(__name__)

STACK_BELOW = 1 << 22
"""Weights of a linear layer below which its call costs more than its bytes, so that calls are worth joining."""

F = TypeVar("F", bound=Callable[..., Any])


class RecompileLimitError(RuntimeError):
    """torch has compiled a pass too often: shapes or the number of threads change again and again."""


class CompiledPass:
    """A decoder's pass over tree rows as a compiled function; the first call takes seconds.

    All that a graph computes is computed row by row; attention alone knows sequences. So the rows of all sequences pass
    as those of one, and a few at least: one graph serves every batch and tree, and a row is the same in each.
    """

    def __init__(self, decoder: DecoderPass) -> None:
        def run(tokens_BN: Tensor, positions_BN: Tensor, mask: Tensor) -> Tensor:
            return decoder(
                input_ids=tokens_BN, position_ids=positions_BN, attention_mask=mask, use_cache=False, tree_plan=AMBIENT
            )

        from torch._dynamo.exc import FailOnRecompileLimitHit

        self._run, self._limit_hit = compile_function(run), FailOnRecompileLimitHit

    def __call__(
        self, tokens_BN: Tensor, positions_BN: Tensor, mask: Tensor, cache: SlotCache, plan: TreePlan
    ) -> Tensor:
        """Hidden states [B, N, F]; the rows' keys and values go into the cache.

        Raises:
            RecompileLimitError: Nothing was computed; no later call will be.
        """
        rows = tokens_BN.numel()
        tokens_1R, positions_1R = (_enough_rows(x) for x in (tokens_BN, positions_BN))
        try:
            with _ambient(cache, plan):
                hidden_1RF: Tensor = self._run(tokens_1R, positions_1R, mask)
            return hidden_1RF[:, :rows].view(*tokens_BN.shape, -1)
        except self._limit_hit as error:
            raise RecompileLimitError("it was compiled too often, as when the number of threads changes") from error


def compile_function(function: F) -> F:
    """``function`` compiled for any sizes of its tensors, with small linear layers of one input joined.

    Modules that it uses must not change any more: no guard watches them.

    Args:
        function: A Python function; what it closes over is fixed from now on.
    """
    stacks: list[packed.PackedLinear] = []
    keep_headers_in_cache()

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        stacks.extend(stack_siblings(graph))
        return cast(Callable[..., Any], compile_fx(graph, inputs))

    compiled = torch.compile(
        _own_copy(function),
        backend=backend,
        dynamic=True,
        fullgraph=True,
        options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},
    )
    compiled.stacks = stacks  # type: ignore[attr-defined]  # the graph knows them by number only
    return cast(F, compiled)


def _own_copy(function: F) -> F:
    """The same function with code of its own: graphs are kept per code object; no guard tells two closures apart."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return cast(F, copy)


_numbers = itertools.count()


def stack_siblings(graph: GraphModule) -> list[packed.PackedLinear]:
    """Join small packed layers that read the same tensor (query, key and value; gate and up) into one; in place.

    Returns:
        The new layers; the graph works as long as they live.
    """
    groups: dict[Any, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.target is torch.ops.medusa.packed_linear or node.target is torch.ops.medusa.packed_linear.default:
            groups.setdefault(node.args[0], []).append(node)
    stacks = []
    for source, nodes in groups.items():
        layers = [packed.find(cast(int, node.args[1])) for node in nodes]
        small = [layer for layer in layers if isinstance(layer, packed.PackedLinear) and layer.weights < STACK_BELOW]
        if len(nodes) < 2 or len(small) < len(nodes):
            continue
        stacks.append(packed.stack(small))
        widths = [layer.out_features for layer in small]
        with graph.graph.inserting_before(nodes[0]):
            joined = graph.graph.call_function(torch.ops.medusa.packed_linear, (source, stacks[-1].handle, sum(widths)))
            parts = graph.graph.call_function(torch.split, (joined, widths, -1))
            for index, node in enumerate(nodes):
                node.replace_all_uses_with(graph.graph.call_function(getitem, (parts, index)))
        for node in nodes:
            graph.graph.erase_node(node)
    graph.recompile()
    return stacks


_now = threading.local()
"""Cache and plan of the pass that runs on this thread."""


@contextmanager
def _ambient(cache: SlotCache, plan: TreePlan) -> Iterator[None]:
    _now.cache, _now.plan = cache, plan
    try:
        yield
    finally:
        del _now.cache, _now.plan


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    cache, plan = _now.cache, _now.plan
    query_BHND, key_BKND, value_BKND = (_apart(x, *plan.draft.tokens.shape) for x in (query, key, value))
    keys, values = cache.layers[layer].update(key_BKND, value_BKND)
    window, chunk = plan.span(layer)
    scoring = Scoring(scaling, window, softcap, sinks, chunk)
    out_RHD = attend_rows(plan, query_BHND, keys, values, scoring).flatten(0, 1)
    padded: Tensor = pad(out_RHD, (0, 0, 0, 0, 0, query.shape[2] - len(out_RHD))).contiguous()
    return padded[None]


def _apart(x: Tensor, batch: int, nodes: int) -> Tensor:
    """Rows [1, H, R, D] of all sequences, and perhaps a few more behind them, as [B, H, N, D]."""
    rows_HRD = x[0, :, : batch * nodes]
    return rows_HRD.view(len(rows_HRD), batch, nodes, -1).transpose(0, 1)


def _enough_rows(x_BN: Tensor) -> Tensor:
    """[1, R]: all numbers, and behind a few of them the last one again; linear layers would pad rows one by one.

    Always a new tensor: one that was made outside of inference mode would compile the graph once more (50 s).
    """
    flat = x_BN.reshape(1, -1)
    missing = max(0, packed.FAST_ROWS - flat.shape[1])
    return torch.cat([flat, flat[:, -1:].expand(1, missing)], 1)


def _attend_shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


_library = torch.library.Library("medusa", "FRAGMENT")
_library.define(
    "tree_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scaling,"
    " float? softcap) -> Tensor"
)
_library.impl("tree_attention", _attend, "CompositeExplicitAutograd")
_library.impl("tree_attention", _attend_shape, "Meta")
