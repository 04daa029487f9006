"""``medusa-bench tune``: who drafts best here, and how much, beside what is found out as it runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from medusa import MedusaModel
from medusa.sampling import Speculation
from serve.demo.compare import Engine, Timing, compare, identical, medusa_engine, transformers_engine, unpacked_copy

AUTO, PLAIN = "auto", "plain"


def measure_arms(
    model: MedusaModel,
    prompts: Sequence[list[int]],
    kinds: Mapping[str, Sequence[int]],
    drafters: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    new_tokens: int,
    temperature: float = 0.0,
    others: Mapping[str, Engine] | None = None,
) -> dict[str, Any]:
    """Answer the same prompts in every way, alternated; all sides hold the same weights in the same dtype.

    Args:
        model: A base, with heads or a draft model where drafters need them.
        prompts: Token ids.
        kinds: Groups of prompts, by index.
        drafters: Names, each tried with every size.
        sizes: Nodes, the root included; 1 is plain decoding, which is always measured.
        rounds: Measured repetitions; medians count.
        new_tokens: Limit per answer.
        temperature: 0 = greedy.
        others: More engines to measure beside ours, by name.

    Returns:
        The report's own part: a row per way, and speeds by kind of each drafter's fastest size.
    """
    ways = {
        f"{name} {nodes}": Speculation(drafter=name, nodes=nodes) for name in drafters for nodes in sizes if nodes > 1
    }
    if not ways:
        raise ValueError(f"nodes ({sizes}) leave no guess to try; give a size of 2 or more")
    ours = {PLAIN: Speculation(nodes=1), AUTO: Speculation(), **ways}
    engines = {
        name: medusa_engine(model, new_tokens, nodes=way.nodes, drafter=way.drafter, temperature=temperature)
        for name, way in ours.items()
    }
    timings = compare(engines | dict(others or {}), prompts, rounds, shown=True)
    plain = timings[PLAIN]
    rows = [_row(name, ours.get(name, Speculation()), timing, plain) for name, timing in timings.items()]
    best = max((row for row in rows if row["name"] in (PLAIN, *ways)), key=lambda row: row["speedup"])
    fastest = [
        max((row["name"] for row in rows if row["drafter"] == drafter), key=lambda n: timings[n].speedup_over(plain))
        for drafter in drafters
    ]
    return {
        "prompts": len(prompts),
        "max_new_tokens": new_tokens,
        "temperature": temperature,
        "rounds": rounds,
        "auto": model.explain(),
        "best": best["name"],
        "auto_over_best": round(timings[AUTO].speedup_over(timings[best["name"]]), 4),
        "rows": rows,
        "kinds": {
            kind: {
                name: round(timings[name].of(members).speedup_over(plain.of(members)), 3)
                for name in (*fastest, AUTO, *(others or {}))
            }
            for kind, members in kinds.items()
        },
    }


def best_settings(report: Mapping[str, Any]) -> Speculation:
    """The settings of the fastest way with a fixed size."""
    row = next(row for row in report["rows"] if row["name"] == report["best"])
    return Speculation(drafter=row["drafter"] or None, nodes=row["nodes"])


def others_of_transformers(
    model: MedusaModel, new_tokens: int, temperature: float, draft_model: str | None
) -> dict[str, Engine]:
    """transformers' own ways of decoding the same weights: plain, prompt lookup, early exit, a draft model."""
    copy = unpacked_copy(model.base)
    ways: dict[str, dict[str, Any]] = {
        "": {},
        " prompt lookup": {"prompt_lookup_num_tokens": 10},
        " early exit": {"assistant_early_exit": max(1, model.base.num_layers // 2)},
    }
    if draft_model:
        small = model.drafters.parts.draft_model
        assert small is not None, "loaded by its name"
        ways[" draft model"] = {"assistant_model": unpacked_copy(small)}
    return {
        f"transformers{name}": transformers_engine(copy, new_tokens, temperature, **how) for name, how in ways.items()
    }


def _row(name: str, way: Speculation, timing: Timing, plain: Timing) -> dict[str, Any]:
    guesses = way.nodes - 1 if way.nodes else 0
    ours = name.split(" ", maxsplit=1)[0] != "transformers"
    return {
        "name": name,
        "shown": way.drafter or name,
        "drafter": way.drafter or "",
        "nodes": way.nodes,
        "k": guesses or "",
        "tokens_per_s": round(timing.tokens_per_second, 1),
        "tokens_per_step": round(timing.tokens_per_step, 3) if ours else "",
        "accepted": f"{(timing.tokens_per_step - 1) / guesses:.0%}" if guesses else "",
        "speedup": round(timing.speedup_over(plain), 3),
        "identical": identical(timing.outputs, plain.outputs),
    }
