"""``medusa bench attention``: time of one layer's tree attention by backend, and the bound from memory traffic."""

import logging
import math
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from medusa.attention import BACKENDS, BackendUnavailableError, Scoring, TreeAttention, TreePlan, attend
from medusa.attention.backends import build
from medusa.attention.contract import BlockTable
from medusa.benchmarks.machine import bandwidth_samples, best_bandwidth, timed
from medusa.benchmarks.step.rig import Sizes, typical_tree
from medusa.benchmarks.step.shapes import key_heads
from medusa.cache import BLOCK
from medusa.clock import alternate
from medusa.tree import Draft

logger = logging.getLogger(__name__)

TREE_DEPTH = 5
LAYERS_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes of keys and values of different layers, read in turn; larger than the caches, as in a real step."""
MOST_LAYERS = 64


def least_bytes(context: int, nodes: int, batch: int, heads: int, kv_heads: int, row_bytes: int) -> int:
    """The least memory traffic of one layer's tree attention, in bytes.

    Every key, value, query and output is read or written once; masks are left out. A time below bytes / bandwidth means
    that data stayed in a cache.
    """
    return 2 * batch * ((context + nodes) * kv_heads + nodes * heads) * row_bytes


def measure_attention(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> dict[str, Any]:
    """Time the attention of one layer for every backend that runs on the device; backends alternate.

    Args:
        config: Config with the number and size of heads.
        dtype: Dtype of queries, keys and values.
        device: The device.
        sizes: Sizes to measure.

    Returns:
        This part of the report: bandwidth, a row per (backend, B, N), and the reasons why backends are missing.
    """
    backends, missing = _backends(device)
    samples = bandwidth_samples(device)
    bounds, modes = {}, {}
    for batch in sizes.batches:
        for count in sizes.nodes:
            layer = _Layer(config, dtype, device, count, batch, sizes)
            bounds[batch, count] = layer.least_bytes
            for name, backend in backends.items():
                if dtype in backend.dtypes:
                    samples[name, batch, count], modes[name, batch, count] = layer.sample(backend)
    times = alternate(samples, sizes.rounds)
    method, bandwidth = best_bandwidth(times)
    rows = [
        {
            "backend": name,
            "batch": batch,
            "nodes": count,
            "mode": modes[name, batch, count],
            "ms": round(1e3 * median(times[name, batch, count]), 5),
            "bound_ms": round(1e3 * least / bandwidth, 5),
            "share_of_bound": round(least / bandwidth / median(times[name, batch, count]), 4),
        }
        for (batch, count), least in bounds.items()
        for name in backends
        if (name, batch, count) in times
    ]
    return {
        "context": sizes.context,
        "heads_of_a_layer": {"query": config.num_attention_heads, "key": key_heads(config)},
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "bandwidth_method": method,
        "rows": rows,
        "missing": missing,
    }


def _backends(device: torch.device) -> tuple[dict[str, TreeAttention], dict[str, str]]:
    """Backends that run on the device, and the reasons why others do not."""
    backends, missing = {}, {}
    for name in BACKENDS:
        try:
            backends[name] = build(name, device)
        except BackendUnavailableError as error:
            missing[name] = str(error)
    return backends, missing


@torch.inference_mode()
def _recorded(action: Callable[[], object]) -> Callable[[], object]:
    """The action as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


class _Layer:
    """Random queries, and keys and values of enough layers to exceed the caches."""

    @torch.inference_mode()
    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, nodes: int, batch: int, sizes: Sizes
    ) -> None:
        heads, kv_heads = config.num_attention_heads, key_heads(config)
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        generator = torch.Generator(device).manual_seed(0)
        tree = typical_tree(nodes, TREE_DEPTH)
        tokens_BN = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
        self._draft = Draft.of(tokens_BN, tree.parents.to(device).expand(batch, -1), tree.depth)
        self._lengths = torch.full((batch,), sizes.context, device=device)
        self._places = sizes.context + nodes
        width = -(-self._places // BLOCK)
        self._table = BlockTable(torch.arange(batch * width, device=device).view(batch, width), BLOCK)
        self._scoring = Scoring(dim**-0.5)
        self._device = device
        shape = (2, batch * width, BLOCK, kv_heads, dim)
        layer_bytes = math.prod(shape) * dtype.itemsize
        self._layers: int = max(1, min(MOST_LAYERS, LAYERS_BYTES[device.type] // layer_bytes))
        self._query = torch.randn(batch * nodes, heads, dim, dtype=dtype, device=device, generator=generator)
        self._keys_values = torch.randn(self._layers, *shape, dtype=dtype, device=device, generator=generator)
        self.least_bytes = least_bytes(sizes.context, nodes, batch, heads, kv_heads, dim * dtype.itemsize)

    def sample(self, backend: TreeAttention) -> tuple[Callable[[], float], str]:
        """A function that measures seconds per layer, with one plan for all layers; and how it runs.

        On a GPU it is one CUDA graph if the backend allows it, because a whole step hides the host's time too.
        """
        action: Callable[[], object] = partial(self._step, backend)
        mode = "eager"
        if self._device.type == "cuda":
            action()  # compile and allocate before recording
            try:
                action, mode = _recorded(action), "graph"
            except RuntimeError as error:
                logger.warning("no CUDA graph: %s", error)
        return lambda: timed(action, self._device) / self._layers, mode

    @torch.inference_mode()
    def _step(self, backend: TreeAttention) -> None:
        plan = TreePlan([self._draft], self._lengths, self._places, self._table, backend)
        for key, value in self._keys_values:
            attend(plan, self._query, key, value, self._scoring)
