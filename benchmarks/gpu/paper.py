"""``python -m medusa.benchmarks.gpu.paper``: bounds on the step time of an 8B model on GPUs, and memory that it needs.

Without a flag it prints the tables of docs/gpu.md, which are computed and not measured. ``--measure FILE`` times the
same steps on this machine's GPU, if they fit, and writes each with its bound.
"""

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.budget.bound import CARDS, FREE, MULTIPLIES, READS, Card, free_nodes, step_work
from medusa.budget.plan import CONTEXTS, Plan, graph_bytes, in_words, make_plan, pass_bytes
from medusa.budget.shape import Shape, read_shape
from medusa.data.arguments import exit_status
from medusa.serve.plan import engine_limits
from medusa.serve.settings import EngineSettings

if TYPE_CHECKING:
    from medusa import MedusaModel

SHAPE, DTYPE = "llama-8b", "bfloat16"
REQUESTS, NODES = (1, 16, 64), (1, 8, 16, 64)
"""Numbers of requests and nodes for computed and measured steps, with ``CONTEXTS``; one node is a plain step."""
SIZES = [(requests, context) for requests in REQUESTS for context in CONTEXTS]
HEADS, ROUNDS = 5, 3
"""Number of recurrent heads in measured steps, and of measured repetitions."""

Row = dict[str, Any]


def tables(shape: Shape) -> str:
    """All tables as Markdown."""
    trees = [f"{nodes} nodes" for nodes in NODES[1:]]
    work = [["batch", "context", "bytes", "plain", *trees]]
    bounds = [["card", "batch", "context", "plain", *trees, "free nodes"]]
    fits = [["card", "batch", "activations", "graphs", "KV cache", *(f"requests of {c // 1024}k" for c in CONTEXTS)]]
    for requests, context in SIZES:
        steps = [step_work(shape, requests, context, nodes) for nodes in NODES]
        flops = [f"{step.flops / 1e12:.3g}" for step in steps]
        work.append([str(requests), f"{context // 1024}k", in_words(steps[0].bytes), *flops])
    for card in CARDS:
        for requests, context in SIZES:
            least = [step_work(shape, requests, context, nodes).milliseconds(card) for nodes in NODES]
            held = [_fits(shape, requests, context, nodes, card.memory) for nodes in NODES]
            cells = [f"{time:.2f}" if fits else "-" for time, fits in zip(least, held, strict=True)]
            free = str(free_nodes(shape, card, requests, context)) if held[0] else "-"
            bounds.append([card.name, str(requests), f"{context // 1024}k", *cells, free])
        for requests in REQUESTS:
            plan = _plan(shape, requests, max(NODES), card.memory)
            cells = ["-"] * (3 + len(CONTEXTS))
            if plan:
                sizes = (pass_bytes(shape, plan.limits), graph_bytes(shape, plan.limits), plan.cache)
                cells = [*map(in_words, sizes), *(str(plan.fitting(context)) for context in CONTEXTS)]
            fits.append([card.name, str(requests), *cells])
    shares = f"{READS:.0%} of a card's bandwidth and {MULTIPLIES:.0%} of its products"
    weights = in_words(shape.weight_bytes)
    titled = {
        "Bytes that a plain step moves, and trillions of floating-point operations of a step:": work,
        f"Least milliseconds of a step at {shares}, and the largest tree whose step\nis bound to at most {FREE} times a"
        ' plain one ("-" = the memory does not hold it):': bounds,
        f"What fits beside {weights} of weights, with trees of {max(NODES)} nodes for each request of the batch:": fits,
    }
    return "\n\n".join(f"{title}\n\n{_markdown(rows)}" for title, rows in titled.items())


def beside(report: Row) -> str:
    """Measured times and their bounds, one line each."""
    lines = [f"{report['device']}, bounds of {report['bounds']}"]
    lines += [f"{'batch':>5} {'context':>7} {'nodes':>5} {'bound ms':>9} {'verify ms':>9} {'of it':>6} {'step ms':>9}"]
    for row in report["rows"]:
        times = "does not fit"
        if "step_ms" in row:
            share = row["bound_ms"] / row["verify_ms"]
            times = f"{row['bound_ms']:>9.2f} {row['verify_ms']:>9.2f} {share:>6.0%} {row['step_ms']:>9.2f}"
        lines.append(f"{row['batch']:>5} {row['context']:>7} {row['nodes']:>5} {times}")
    return "\n".join(lines)


def key_figure(report: Row) -> str:
    """The report in one line."""
    shares = [row["bound_ms"] / row["verify_ms"] for row in report["rows"] if "step_ms" in row]
    return f"{len(shares)} steps, verified at {min(shares):.0%} to {max(shares):.0%} of their bound"


def measured(
    model: "MedusaModel", card: Card, sizes: Sequence[tuple[int, int]], nodes: Sequence[int], rounds: int
) -> Iterator[Row]:
    """Measured steps with their bounds; steps that do not fit the memory have no times.

    Args:
        model: A base with heads.
        card: The card for which bounds are computed, with its available memory.
        sizes: Number of requests, and cached tokens of each.
        nodes: Numbers of nodes of each request's tree.
        rounds: Number of measured repetitions.
    """
    import torch

    from medusa.benchmarks.step.rig import Sizes
    from medusa.benchmarks.step.step import measure_steps

    shape = read_shape(model.base.config, model.base.dtype)
    for batch, context in sizes:
        times: dict[int, Row] = {}
        fitting = [count for count in nodes if _fits(shape, batch, context, count, card.memory)]
        if fitting:
            with contextlib.suppress(torch.OutOfMemoryError):
                steps = measure_steps(model, Sizes(fitting, [batch], context, rounds))
                times = {row["nodes"]: row for row in steps["rows"]}
        for count in nodes:
            row: Row = {"batch": batch, "context": context, "nodes": count}
            if count in times:
                bound = step_work(shape, batch, context, count).milliseconds(card)
                row |= {name: times[count][name] for name in ("verify_ms", "step_ms")} | {"bound_ms": round(bound, 4)}
            yield row
        model.release()  # free the KV cache of one batch before the next is allocated
        gc.collect()
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 a failure, 2 wrong use.
    """
    parser = argparse.ArgumentParser(prog="python -m medusa.benchmarks.gpu.paper", description=__doc__)
    text = "time steps on the GPU here; the report goes there"
    parser.add_argument("--measure", metavar="FILE", type=Path, help=text)
    path = parser.parse_args(arguments).measure
    return exit_status(lambda: _measure(path) if path else sys.stdout.write(f"{tables(_paper_shape())}\n"))


def card_of(device: str, memory: int, bandwidth: float) -> Card:
    """The card with this name and memory; for an unknown card only the measured bandwidth bounds the time."""
    known = next((card for card in CARDS if card.device == device), None)
    known = known or Card("its own bandwidth, measured", device, memory, bandwidth / READS, float("inf"))
    return known._replace(memory=memory)


def _paper_shape() -> Shape:
    import torch

    from medusa.benchmarks.step.shapes import shape_config

    return read_shape(shape_config(SHAPE), getattr(torch, DTYPE))


def _measure(path: Path) -> None:
    import torch

    from medusa import MedusaModel
    from medusa.base.checkpoint import usable_device
    from medusa.benchmarks.machine import bandwidth_samples, best_bandwidth
    from medusa.benchmarks.step.shapes import random_base, random_heads, shape_config
    from medusa.clock import alternate
    from medusa.files import write_json
    from medusa.loading.self_test import fuse

    device = usable_device("cuda")
    properties = torch.cuda.get_device_properties(device)
    _, bandwidth = best_bandwidth(alternate(bandwidth_samples(device), ROUNDS))
    card = card_of(properties.name, properties.total_memory, bandwidth)
    base = fuse(random_base(shape_config(SHAPE), getattr(torch, DTYPE), device))
    model = MedusaModel(base, random_heads(base, "recurrent", HEADS))
    report: Row = {"device": properties.name, "bounds": card.name, "bandwidth_gb_per_s": bandwidth / 1e9, "rows": []}
    for row in measured(model, card, SIZES, NODES, ROUNDS):
        report["rows"].append(row)
        write_json(path, report)  # after each step, so that results survive a kill
    sys.stdout.write(f"{beside(report)}\n")


def _plan(shape: Shape, requests: int, nodes: int, memory: int) -> Plan | None:
    """The memory plan with the server's limits; None if no memory is left for the KV cache."""
    limits = replace(engine_limits(EngineSettings(max_batch=requests)), nodes=nodes)
    try:
        return make_plan(shape, limits, memory)
    except ValueError:
        return None


def _fits(shape: Shape, requests: int, context: int, nodes: int, memory: int) -> bool:
    plan = _plan(shape, requests, nodes, memory)
    return plan is not None and plan.fitting(context) >= requests


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
