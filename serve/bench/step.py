"""``medusa-bench step``: the cost of a step against the number of tree nodes, beside the bound that memory sets.

Decoding reads all weights and the cached keys and values once per pass. A pass cannot be faster than these bytes
divided by the bandwidth of the memory, which is measured in the same run. Up to some number of nodes a pass costs
little more than that: this is what drafting lives on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from medusa import BaseModel, DraftHeads
from medusa.clock import alternate
from medusa.engine.graph import Record
from serve.bench.rig import Rig, room_for
from serve.bench.shapes import weight_bytes
from serve.bench.timing import bandwidth_samples, ratio, timed

Times = dict[tuple[Any, ...], list[float]]


@dataclass(frozen=True)
class Roofline:
    """The bound that memory sets."""

    weight_bytes: int
    """Read once per pass, whatever the batch."""
    kv_bytes_per_token: int
    """Keys and values of one cached token, read once per pass and sequence."""
    bytes_per_second: float
    """The median of the fastest way to read memory, measured in the same rounds."""

    def seconds(self, batch: int, context: int) -> float:
        """The shortest possible pass over ``batch`` sequences of ``context`` cached tokens."""
        return (self.weight_bytes + batch * context * self.kv_bytes_per_token) / self.bytes_per_second


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
    samples: dict[tuple[Any, ...], Any] = {
        ("bandwidth", name): sample for name, sample in bandwidth_samples(base.device).items()
    }
    for batch, rig in rigs.items():
        for count in nodes:
            samples["verify", batch, count] = partial(timed, rig.verifier(rig.draft(count)), base.device)
            samples["step", batch, count] = partial(rig.step_seconds, rig.drafter(count))
    times = alternate(samples, rounds)
    method, bandwidth = best_bandwidth(times)
    roofline = Roofline(weight_bytes(base), rigs[batches[0]].kv_bytes_per_token, bandwidth)
    return {
        "context": context,
        "graph": rigs[batches[0]].graph,
        "weight_bytes": roofline.weight_bytes,
        "kv_bytes_per_token": roofline.kv_bytes_per_token,
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "bandwidth_method": method,
        "rows": [_row(times, roofline, method, batch, count, context) for batch in batches for count in nodes],
    }


def best_bandwidth(times: Times) -> tuple[str, float]:
    """Which way of reading memory is fastest, and its median bytes per second."""
    best = {key[1]: median(values) for key, values in times.items() if key[0] == "bandwidth"}
    method = max(best, key=lambda name: best[name])
    return method, best[method]


def _row(times: Times, roofline: Roofline, method: str, batch: int, nodes: int, context: int) -> dict[str, Any]:
    verify, step = times["verify", batch, nodes], times["step", batch, nodes]
    bound = roofline.seconds(batch, context)
    moved = bound * roofline.bytes_per_second
    # Within a round, since a shared machine's memory is fast in one second and slow in the next.
    bounds = [moved / bandwidth for bandwidth in times["bandwidth", method]]
    return {
        "batch": batch,
        "nodes": nodes,
        "verify_ms": round(1e3 * median(verify), 4),
        "step_ms": round(1e3 * median(step), 4),
        "verify_overhead": round(ratio(verify, times["verify", batch, 1]), 4),
        "step_overhead": round(ratio(step, times["step", batch, 1]), 4),
        "rows_per_s": round(batch * nodes / median(step), 1),
        "roofline_ms": round(1e3 * bound, 4),
        "roofline_share": round(ratio(bounds, step), 4),
        "rounds_step_ms": [round(1e3 * seconds, 4) for seconds in step],
    }
