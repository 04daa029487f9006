"""``medusa-bench scaling``: what a pass and a draft cost as one size grows, beside a cost model.

Sizes grow one at a time from a short context, one sequence, and the shape's own vocabulary. Passes are those of plain
decoding (N = 1) and of a tree. The model's rates are measured in the same run: the memory's bandwidth, products of the
linear layers in a pass over many rows, and products of the attention in what a long context adds to a tree's pass.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.machine import bandwidth_samples, best_bandwidth, timed
from benchmarks.step.cost import Rates, Work, draft_work, pass_work
from benchmarks.step.rig import Rig
from benchmarks.step.shapes import as_loaded, random_base, random_heads
from medusa import Tree
from medusa.clock import alternate
from medusa.drafters import HeadsDrafter

MANY, LONG = 256, 4096
"""Rows of the pass, and cached tokens, that the model's rates of products are found with."""


@dataclass(frozen=True)
class Sizes:
    """What grows; the first value of ``contexts`` is where the other sizes are measured."""

    contexts: Sequence[int]
    batches: Sequence[int]
    nodes: Sequence[int]
    vocabularies: Sequence[int]
    levels: Sequence[int]
    tree: int
    """Nodes of the tree beside plain decoding."""


def short_rig(
    config: PretrainedConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    sizes: Sizes,
    vocabulary: int | None = None,
) -> Rig:
    """One sequence with the first context, of a base that has this vocabulary (None = the shape's own)."""
    config = copy.deepcopy(config)
    config.vocab_size = vocabulary or config.vocab_size
    longest = max(*sizes.contexts, LONG) + 2 * MANY
    config.max_position_embeddings = max(config.max_position_embeddings, longest)
    base = random_base(config, dtype, device)
    heads = random_heads(base, "recurrent", max(sizes.levels))
    return Rig(*as_loaded(base, heads), batch=1, context=sizes.contexts[0], room=2 * MANY)


def resized(rig: Rig, context: int, batch: int) -> Rig:
    """Other sequences of the same base."""
    return Rig(rig.base, rig.heads, batch, context, room=2 * MANY)


def measure_scaling(
    config: PretrainedConfig, dtype: torch.dtype | None, device: torch.device, sizes: Sizes, rounds: int
) -> dict[str, Any]:
    """Time passes and drafts of all sizes, alternately.

    Args:
        config: The shape.
        dtype: None = bfloat16, or what the device has instead.
        device: Where it runs.
        sizes: What grows.
        rounds: Measured repetitions.

    Raises:
        ValueError: No context is short.

    Returns:
        The report's own part: the rates (None = too high to be told), and rows of
        {size, value, nodes, ms, model_ms}; nodes 0 are drafts.
    """
    short = sizes.contexts[0]
    if short >= LONG:
        raise ValueError(f"context ({short}) is where other sizes are measured; begin with one below {LONG}")
    plain = short_rig(config, dtype, device, sizes)
    rigs = {("context", value): resized(plain, value, batch=1) for value in {*sizes.contexts, LONG}}
    rigs |= {("batch", value): resized(plain, short, value) for value in sizes.batches}
    rigs |= {("vocabulary", value): short_rig(config, dtype, device, sizes, value) for value in sizes.vocabularies}
    works: dict[Any, Work] = {}
    samples = bandwidth_samples(device)

    def add(size: str, value: int, rig: Rig, nodes: int) -> None:
        works[size, value, nodes] = pass_work(rig, nodes)
        samples[size, value, nodes] = partial(timed, rig.verifier(rig.draft(nodes)), device)

    def add_draft(size: str, value: int, rig: Rig, levels: int) -> None:
        drafter = HeadsDrafter(rig.heads, rig.base, levels + 1, Tree.chain(levels))
        works[size, value, 0] = draft_work(rig.heads, levels)
        samples[size, value, 0] = partial(timed, partial(_draft, drafter, rig), device)

    for (size, value), rig in rigs.items():
        for nodes in (1, sizes.tree):
            add(size, value, rig, nodes)
        if size == "vocabulary":
            add_draft(size, value, rig, sizes.levels[-1])
    for nodes in {1, *sizes.nodes, MANY}:
        add("tree", nodes, plain, nodes)
    for levels in sizes.levels:
        add_draft("levels", levels, plain, levels)
    times = alternate(samples, rounds)
    rates = find_rates(times, works, sizes, short)
    rows = [
        {
            "size": size, "value": value, "nodes": nodes,
            "ms": round(1e3 * median(times[size, value, nodes]), 3),
            "model_ms": round(1e3 * work.seconds(rates), 3),
        }
        for (size, value, nodes), work in sorted(works.items())
    ]  # fmt: skip
    return {
        "context": short, "tree": sizes.tree, "draft_levels": sizes.levels[-1],
        "bandwidth_gb_per_s": round(rates.bandwidth / 1e9, 1), "bandwidth_method": best_bandwidth(times)[0],
        "linear_gflops": round(rates.linear / 1e9),
        "attention_gflops": round(rates.attention / 1e9) if isfinite(rates.attention) else None,
        "heads": f"{max(sizes.levels)} recurrent, random", "rows": rows,
    }  # fmt: skip


def find_rates(times: Mapping[Any, list[float]], works: Mapping[Any, Work], sizes: Sizes, short: int) -> Rates:
    """The machine's rates: of memory, of a pass over ``MANY`` rows, and of what ``LONG`` adds to a tree's pass."""
    many, long, tree = ("tree", MANY, MANY), ("context", LONG, sizes.tree), ("context", short, sizes.tree)
    linear = works[many].linear / median(times[many])
    more = median(times[long]) - median(times[tree])
    attention = (works[long].attention - works[tree].attention) / more if more > 0 else float("inf")
    return Rates(best_bandwidth(times)[1], linear, attention)


@torch.inference_mode()
def _draft(drafter: HeadsDrafter, rig: Rig) -> object:
    return drafter.propose(rig.state)
