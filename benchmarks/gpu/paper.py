"""``python -m benchmarks.gpu.paper``: what a step of an 8B model is bound to take on GPUs, and what fits in them.

Without a flag it prints the tables of docs/gpu.md, which are computed and not measured. ``--measure FILE`` times the
same steps on the GPU that is here, as far as they fit, and writes each with its bound.
"""

import argparse
import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.budget.bound import CARDS, FREE, MULTIPLIES, READS, Card, free_nodes, step_work
from medusa.budget.plan import CONTEXTS, Limits, Plan, in_words, make_plan
from medusa.budget.shape import Shape, read_shape

if TYPE_CHECKING:
    from medusa import BaseModel, DraftHeads

SHAPE, DTYPE = "llama-8b", "bfloat16"
REQUESTS, NODES = (1, 16, 64), (1, 8, 16, 64)
"""That are computed and measured, with ``CONTEXTS``; one node is a plain step."""
HEADS, ROUNDS = 5, 3
"""Recurrent heads that draft in measured steps, and measured repetitions."""
MARKS = ("<!-- python -m benchmarks.gpu.paper -->", "<!-- end -->")
"""Around the tables in docs/gpu.md."""

Row = dict[str, Any]


def tables(shape: Shape) -> str:
    """All tables as Markdown."""
    work = [("batch", "context", "bytes", "plain", *(f"{n} nodes" for n in NODES[1:]))]
    bounds = [("card", "batch", "context", "plain", *(f"{n} nodes" for n in NODES[1:]), "free nodes")]
    fits = [("card", "batch", "activations", "graphs", "KV cache", *(f"requests of {_short(c)}" for c in CONTEXTS))]
    for requests, context in _sizes():
        steps = [step_work(shape, requests, context, nodes) for nodes in NODES]
        flops = (f"{step.flops / 1e12:.3g}" for step in steps)
        work.append((str(requests), _short(context), in_words(steps[0].bytes), *flops))
    for card in CARDS:
        for requests, context in _sizes():
            cells = []
            for nodes in NODES:
                time = step_work(shape, requests, context, nodes).milliseconds(card)
                cells.append(f"{time:.2f}" if _fits(shape, requests, context, nodes, card.memory) else "-")
            free = str(free_nodes(shape, card, requests, context)) if cells[0] != "-" else "-"
            bounds.append((card.name, str(requests), _short(context), *cells, free))
        for requests in REQUESTS:
            plan = _plan(shape, requests, max(NODES), card.memory)
            cells = [in_words(size) for size in (plan.activations, plan.graphs, plan.cache)] if plan else ["-"] * 3
            counts = (str(plan.fitting(context) if plan else 0) for context in CONTEXTS)
            fits.append((card.name, str(requests), *cells, *counts))
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
    """What was measured beside its bound, line by line."""
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
    rows = [row for row in report["rows"] if "step_ms" in row]
    shares = [row["bound_ms"] / row["verify_ms"] for row in rows]
    return f"{len(rows)} steps, verified at {min(shares):.0%} to {max(shares):.0%} of their bound"


def measured(
    base: "BaseModel", heads: "DraftHeads", card: Card, shape: Shape, rounds: int = ROUNDS,
    contexts: Sequence[int] = CONTEXTS, batches: Sequence[int] = REQUESTS, nodes: Sequence[int] = NODES,
) -> Iterator[Row]:  # fmt: skip
    """Steps and their bounds; those that the memory does not hold have no times.

    Args:
        base: Prepared for decoding.
        heads: Its heads.
        card: What bounds are computed for; its memory is what there is.
        shape: Of the base.
        rounds: Measured repetitions.
        contexts: Cached tokens of each request.
        batches: Requests.
        nodes: Of each request's tree.
    """
    import torch

    from benchmarks.step.step import measure_steps

    for batch, context in _sizes(batches, contexts):
        fitting = [count for count in nodes if _fits(shape, batch, context, count, card.memory)]
        figures: Row = {"rows": []}
        if fitting:
            with contextlib.suppress(torch.OutOfMemoryError):
                figures = measure_steps(base, heads, fitting, [batch], context, rounds)
        times = {row["nodes"]: row for row in figures["rows"]}
        for count in nodes:
            row: Row = {"batch": batch, "context": context, "nodes": count}
            if count in times:
                bound = step_work(shape, batch, context, count).milliseconds(card)
                row |= {name: times[count][name] for name in ("verify_ms", "step_ms")} | {"bound_ms": round(bound, 4)}
            yield row
        gc.collect()  # the keys and values of one batch go before those of the next come
        if base.device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 a failure, 2 wrong use.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.paper", description=__doc__)
    parser.add_argument(
        "--measure", metavar="FILE", type=Path, help="time steps on the GPU here; the report goes there"
    )
    options = parser.parse_args(arguments)
    try:
        if options.measure:
            _measure(options.measure)
        else:
            sys.stdout.write(f"{tables(paper_shape())}\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def paper_shape() -> Shape:
    """Llama 3.1 8B."""
    import torch

    from benchmarks.step.shapes import shape_config

    return read_shape(shape_config(SHAPE), getattr(torch, DTYPE))


def card_of(device: str, memory: int, bandwidth: float) -> Card:
    """The card of that name; one that is not in the table has the bandwidth that was measured, and no other bound."""
    known = next((card for card in CARDS if card.device == device), None)
    return known or Card("its own bandwidth, measured", device, memory, bandwidth / READS, float("inf"))


def _measure(path: Path) -> None:
    import torch

    from benchmarks.machine import bandwidth_samples, best_bandwidth, choose_device
    from benchmarks.step.shapes import as_loaded, random_base, random_heads, shape_config
    from medusa.clock import alternate
    from medusa.files import write_json

    device = choose_device("cuda")
    properties = torch.cuda.get_device_properties(device)
    _, bandwidth = best_bandwidth(alternate(bandwidth_samples(device), ROUNDS))
    card = card_of(properties.name, properties.total_memory, bandwidth)
    base = random_base(shape_config(SHAPE), getattr(torch, DTYPE), device)
    base, heads = as_loaded(base, random_heads(base, "recurrent", HEADS))
    report: Row = {"device": properties.name, "bounds": card.name, "bandwidth_gb_per_s": bandwidth / 1e9, "rows": []}
    here = dataclasses.replace(card, memory=properties.total_memory)
    for row in measured(base, heads, here, paper_shape()):
        report["rows"].append(row)
        write_json(path, report)  # after each: what was measured survives an end from outside
    sys.stdout.write(f"{beside(report)}\n")


def _sizes(batches: Sequence[int] = REQUESTS, contexts: Sequence[int] = CONTEXTS) -> Iterable[tuple[int, int]]:
    return [(batch, context) for batch in batches for context in contexts]


def _plan(shape: Shape, requests: int, nodes: int, memory: int) -> Plan | None:
    """With the server's limits; None where nothing is left for the KV cache."""
    from medusa.cache import BLOCK
    from medusa.engine.row import TREES
    from serve.settings import EngineSettings

    try:
        return make_plan(shape, Limits(requests, nodes, EngineSettings().prefill_rows, BLOCK, TREES), memory)
    except ValueError:
        return None


def _fits(shape: Shape, requests: int, context: int, nodes: int, memory: int) -> bool:
    plan = _plan(shape, requests, nodes, memory)
    return plan is not None and plan.fitting(context) >= requests


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k"


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
