"""``medusa-bench nodes``: sizes that are found as it runs beside fixed sizes and plain decoding, on real answers."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from medusa import MedusaModel
from serve.compare import Timing, compare, medusa_engine


def measure_nodes(
    model: MedusaModel,
    prompts: Sequence[list[int]],
    sizes: Sequence[int],
    drafter: str | None,
    max_new_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Answer the same prompts greedily in every way, alternated.

    Args:
        model: A base with heads.
        prompts: Token ids.
        sizes: Values of ``nodes`` to compare with; plain decoding and auto are always measured too.
        drafter: As ``MedusaModel.start`` takes it.
        max_new_tokens: Limit per answer.
        rounds: Measured repetitions.

    Returns:
        The report's own part: a row per way, and how auto stands beside plain decoding and the best size.
    """
    ways: dict[str, int | None] = {"plain": 1, "auto": None} | {str(n): n for n in sorted(set(sizes)) if n > 1}
    engines = {name: medusa_engine(model, max_new_tokens, nodes=nodes, drafter=drafter) for name, nodes in ways.items()}
    timings = compare(engines, prompts, rounds, shown=True)
    fixed = [name for name in ways if name != "auto"]
    best = max(fixed, key=lambda name: timings[name].tokens_per_second)
    return {
        "drafter": drafter or "default",
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "auto": model.explain(drafter),
        "best_fixed": best,
        "auto_over_best_fixed": round(timings["auto"].speedup_over(timings[best]), 4),
        "auto_over_plain": round(timings["auto"].speedup_over(timings["plain"]), 4),
        "rows": [_row(name, timing, timings["plain"]) for name, timing in timings.items()],
    }


def _row(name: str, timing: Timing, plain: Timing) -> dict[str, Any]:
    return {
        "nodes": name,
        "tokens_per_s": round(median(timing.rates), 1),
        "tokens_per_step": round(timing.tokens_per_step, 4),
        "speedup": round(timing.speedup_over(plain), 4),
        "rounds_tokens_per_s": [round(rate, 1) for rate in timing.rates],
    }
