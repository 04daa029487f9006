"""``medusa-bench step``: the cost of a step against the number of tree nodes, beside the bound that memory sets.

Decoding reads all weights and the cached keys and values once per pass. A pass cannot be faster than these bytes
divided by the bandwidth of the memory, which is measured in the same run. Up to some number of nodes a pass costs
little more than that: this is what drafting lives on.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.machine import Key, bandwidth_samples, best_bandwidth, ratio, timed
from benchmarks.step.rig import Rig, room_for
from benchmarks.step.shapes import weight_bytes
from medusa import BaseModel, DraftHeads
from medusa.clock import alternate
from medusa.engine.graph import Record

Times = dict[Key, list[float]]


def measure_steps(
    base: BaseModel,
    heads: DraftHeads,
    nodes: Sequence[int],
    batches: Sequence[int],
    context: int,
    rounds: int,
    seed: int = 0,
    record: Record | None = None,
) -> dict[str, Any]:
    """Time verify passes and whole steps of fixed trees, alternately, as ``generate`` runs them: on a GPU as graphs.

    Args:
        base: Prepared for decoding.
        heads: Its heads.
        nodes: Tree sizes N; 1 (plain decoding) is always measured too.
        batches: Batch sizes B.
        context: Cached tokens L per sequence.
        rounds: Measured repetitions.
        seed: Of the contents.
        record: As ``Rig`` takes it.

    Returns:
        The report's own part: bytes, bandwidth, and a row per (B, N).
    """
    nodes = sorted({1, *nodes})
    room = room_for(max(nodes), heads.config.num_heads)
    rigs = {batch: Rig(base, heads, batch, context, room, seed, record) for batch in batches}
    samples = bandwidth_samples(base.device)
    for batch, rig in rigs.items():
        for count in nodes:
            samples["verify", batch, count] = partial(timed, rig.verifier(rig.draft(count)), base.device)
            samples["step", batch, count] = partial(rig.step_seconds, rig.drafter(count))
    times = alternate(samples, rounds)
    method, bandwidth = best_bandwidth(times)
    weights, kv_bytes = weight_bytes(base), rigs[batches[0]].kv_bytes_per_token
    return {
        "context": context,
        "graph": rigs[batches[0]].graph,
        "weight_bytes": weights,
        "kv_bytes_per_token": kv_bytes,
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "bandwidth_method": method,
        "rows": [
            _row(times, method, pass_bytes(weights, kv_bytes, batch, context), batch, count)
            for batch in batches
            for count in nodes
        ],
    }


def pass_bytes(weight_bytes: int, kv_bytes_per_token: int, batch: int, context: int) -> int:
    """What a pass cannot avoid to read: all weights once, and ``context`` cached tokens of each sequence."""
    return weight_bytes + batch * context * kv_bytes_per_token


def _row(times: Times, method: str, read: int, batch: int, nodes: int) -> dict[str, Any]:
    verify, step, bandwidths = times["verify", batch, nodes], times["step", batch, nodes], times["bandwidth", method]
    # Within a round, since a shared machine's memory is fast in one second and slow in the next.
    bounds = [read / bandwidth for bandwidth in bandwidths]
    return {
        "batch": batch,
        "nodes": nodes,
        "verify_ms": round(1e3 * median(verify), 4),
        "step_ms": round(1e3 * median(step), 4),
        "verify_overhead": round(ratio(verify, times["verify", batch, 1]), 4),
        "step_overhead": round(ratio(step, times["step", batch, 1]), 4),
        "rows_per_s": round(batch * nodes / median(step), 1),
        "roofline_ms": round(1e3 * read / median(bandwidths), 4),
        "roofline_share": round(ratio(bounds, step), 4),
        "rounds_step_ms": [round(1e3 * seconds, 4) for seconds in step],
    }
