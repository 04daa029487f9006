"""``medusa bench step``: the time of a step by number of tree nodes, and the bound from memory bandwidth.

Decoding reads all weights and the cached keys and values once per pass. A pass cannot be faster than these bytes
divided by the bandwidth of the memory, which is measured in the same run. Up to some number of nodes a pass takes
little more time than this bound; this makes speculative decoding worthwhile.
"""

from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from medusa import MedusaModel, Speculation
from medusa.benchmarks.machine import Key, bandwidth_samples, best_bandwidth, ratio
from medusa.benchmarks.step.rig import PLAIN, FreeDrafter, Rig, Sizes, typical_tree
from medusa.budget.bound import step_work
from medusa.budget.shape import read_shape
from medusa.clock import alternate

Times = dict[Key, list[float]]


def measure_steps(model: MedusaModel, sizes: Sizes, tokens_per_step: float | None = None) -> dict[str, Any]:
    """Time steps with fixed trees alternately, run as in ``generate``: as graphs on a GPU.

    Args:
        model: A base with heads.
        sizes: Sizes to measure; plain decoding (N = 1) is always measured.
        tokens_per_step: Tokens per step of trained heads; if given, the projected speed of this shape is added.

    Returns:
        This part of the report: bandwidth, and a row per (B, N): ``step`` is a whole step, ``verify`` a step whose
        drafts take no time.
    """
    assert model.heads is not None, "steps draft with heads"
    nodes, batches, context = sorted({1, *sizes.nodes}), sizes.batches, sizes.context
    depth, base = model.heads.config.num_heads, model.base
    samples = bandwidth_samples(base.device)
    for batch in batches:
        rig = Rig(model, batch, context, max(nodes))
        for count in nodes:
            tree = typical_tree(count, depth)
            drafted = PLAIN if count == 1 else Speculation(tree=tree)
            free = PLAIN if count == 1 else Speculation(drafter=FreeDrafter(tree, base.device))
            samples["step", batch, count] = partial(rig.step_seconds, drafted)
            samples["verify", batch, count] = partial(rig.step_seconds, free)
    times = alternate(samples, sizes.rounds)
    method, bandwidth = best_bandwidth(times)
    shape = read_shape(base.model.config, base.dtype, base.int8)
    if base.packed:
        shape = replace(shape, held=base.weight_bytes)
    rows = [
        _row(times, method, step_work(shape, batch, context).bytes, batch, count)
        for batch in batches
        for count in nodes
    ]
    if tokens_per_step:
        for row in rows:
            emitted = min(tokens_per_step, row["nodes"])
            row["projected_tokens_per_s"] = round(1e3 * row["batch"] * emitted / row["step_ms"], 2)
            row["projected_speedup"] = round(emitted / row["step_overhead"], 4)
    return {
        "context": context,
        "graph": model.graphs is not None,
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "bandwidth_method": method,
        "tokens_per_step": tokens_per_step,
        "rows": rows,
    }


def _row(times: Times, method: str, read: float, batch: int, nodes: int) -> dict[str, Any]:
    verify, step, bandwidths = times["verify", batch, nodes], times["step", batch, nodes], times["bandwidth", method]
    # Ratios within a round, because a shared machine's memory may be fast in one second and slow in the next.
    bounds = [read / bandwidth for bandwidth in bandwidths]
    return {
        "batch": batch,
        "nodes": nodes,
        "verify_ms": round(1e3 * median(verify), 4),
        "step_ms": round(1e3 * median(step), 4),
        "verify_overhead": round(ratio(verify, times["verify", batch, 1]), 4),
        "step_overhead": round(ratio(step, times["step", batch, 1]), 4),
        "rows_per_s": round(batch * nodes / median(step), 1),
        "read_bytes": round(read),
        "roofline_ms": round(1e3 * read / median(bandwidths), 4),
        "roofline_share": round(ratio(bounds, step), 4),
        "rounds_step_ms": [round(1e3 * seconds, 4) for seconds in step],
    }
