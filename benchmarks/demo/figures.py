"""Measures a base with heads on held-out prompts: transformers, plain decoding and every drafter, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medusa import MedusaModel
from medusa.benchmarks.demo import AUTO, LABELS
from medusa.benchmarks.run.measure import figures, measure, repeated_share
from medusa.benchmarks.run.methods import PLAIN, of_transformers, ours, unpacked_copy


def measured(
    model: MedusaModel,
    prompts: Sequence[list[int]],
    kinds: Mapping[str, Sequence[int]],
    rounds: int,
    new_tokens: int,
) -> dict[str, Any]:
    """Decode held-out prompts in all ways alternately; all methods have the same weights in the same dtype.

    Args:
        model: The base with its heads.
        prompts: Token ids of the prompts.
        kinds: Groups of prompts: name to indices.
        rounds: Number of measured repetitions.
        new_tokens: Most new tokens per answer.

    Returns:
        Values for JSON: speeds in tokens per second over whole calls, tokens per step, and for each drafter the number
        of outputs that equal plain decoding's in the same dtype.
    """
    base = model.base
    theirs = of_transformers(unpacked_copy(base), base.eos_ids, new_tokens, 0.0)[0]
    methods = [theirs, *(ours(model, name, new_tokens, 0.0) for name in (PLAIN, *LABELS))]
    timings = measure(methods, prompts, 1, rounds)
    rows = {row["method"]: row for row in figures(methods, timings, kinds, 1)}
    speeds = {name: row["tokens_per_s"]["value"] for name, row in rows.items()}
    slow, plain = speeds[theirs.name], speeds[PLAIN]
    drafters = {name: _row(rows[name], speeds[name] / slow) for name in LABELS}
    auto, dtype = drafters[AUTO], str(base.dtype).removeprefix("torch.")
    same = {"count": auto["identical_outputs"], "total": len(prompts), "dtype": dtype, "against": "plain greedy"}
    return {
        "base": base.name,
        "source": base.source,
        "drafter": AUTO,
        **{key: auto[key] for key in ("tokens_per_step", "speedup", "speedup_over_transformers")},
        "plain_tokens_per_s": round(plain, 1),
        "plain_speedup_over_transformers": round(plain / slow, 3),
        "medusa_tokens_per_s": auto["tokens_per_s"],
        "hf_tokens_per_s": round(slow, 1),
        "identical_outputs": same,
        "drafters": drafters,
        "rates": {name: [round(rate, 1) for rate in row["rounds"]] for name, row in rows.items()},
        "repeated_4grams": round(repeated_share(timings[PLAIN].outputs), 3),
        "prompts": len(prompts),
        "max_new_tokens": new_tokens,
        "rounds": rounds,
        "nodes": "auto",
        "dtype": dtype,
        "fused": base.fused,
        "device": str(base.device),
        "threads": torch.get_num_threads(),
    }


def _row(row: Mapping[str, Any], over_transformers: float) -> dict[str, float | int]:
    """The figures of one drafter."""
    found: dict[str, float | int] = {
        "tokens_per_step": round(row["tokens_per_pass"], 3),
        "tokens_per_s": round(row["tokens_per_s"]["value"], 1),
        "speedup": round(row["over_plain"]["value"], 3),
        "speedup_over_transformers": round(over_transformers, 3),
        "identical_outputs": row["identical"],
    }
    for kind, own in row["kinds"].items():
        found[f"tokens_per_step_{kind}"] = round(own["tokens_per_pass"], 3)
        found[f"speedup_{kind}"] = round(own["over_plain"], 3)
    return found
