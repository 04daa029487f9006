"""Measures a base with heads on held-out prompts: transformers, plain decoding and every drafter, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from medusa import MedusaModel
from medusa.serve.demo import AUTO, LABELS
from medusa.serve.demo import compare as run
from medusa.serve.demo.compare import Timing

SAMPLE_CHARACTERS = 60
"""Least number of characters of the sample answer."""


def measure(
    model: MedusaModel,
    prompts: Sequence[list[int]],
    kinds: Mapping[str, Sequence[int]],
    rounds: int,
    new_tokens: int,
) -> dict[str, Any]:
    """Decode held-out prompts in all ways alternately; all engines have the same weights in the same dtype.

    Args:
        model: The base with its heads.
        prompts: Token ids of the prompts.
        kinds: Groups of prompts: name to indices.
        rounds: Number of measured repetitions; results are medians.
        new_tokens: Most new tokens per answer.

    Returns:
        Values for JSON: speeds in tokens per second over whole calls, tokens per step, and for each drafter the number
        of outputs that equal plain decoding's in the same dtype.
    """
    base = model.base
    engines = {
        "transformers": run.transformers_engine(run.unpacked_copy(base), new_tokens),
        "plain": run.medusa_engine(model, new_tokens, nodes=1),
        **{name: run.medusa_engine(model, new_tokens, drafter=None if name == AUTO else name) for name in LABELS},
    }
    timings = run.compare(engines, prompts, rounds)
    plain, transformers = timings["plain"], timings["transformers"]
    drafters = {name: _row(timings[name], plain, transformers, kinds) for name in LABELS}
    auto, dtype = drafters[AUTO], str(base.dtype).removeprefix("torch.")
    same = {"count": auto["identical_outputs"], "total": len(prompts), "dtype": dtype, "against": "plain greedy"}
    return {
        "base": base.name,
        "source": base.source,
        "drafter": AUTO,
        **{key: auto[key] for key in ("tokens_per_step", "speedup", "speedup_over_transformers")},
        "plain_tokens_per_s": round(plain.tokens_per_second, 1),
        "plain_speedup_over_transformers": round(plain.speedup_over(transformers), 3),
        "medusa_tokens_per_s": auto["tokens_per_s"],
        "hf_tokens_per_s": round(transformers.tokens_per_second, 1),
        "identical_outputs": same,
        "drafters": drafters,
        "rates": {name: [round(rate, 1) for rate in timing.rates] for name, timing in timings.items()},
        "repeated_4grams": round(run.repeated_share(plain.outputs), 3),
        "prompts": len(prompts),
        "max_new_tokens": new_tokens,
        "rounds": rounds,
        "nodes": "auto",
        "dtype": dtype,
        "fused": base.fused,
        "device": str(base.device),
        "threads": torch.get_num_threads(),
        "sample": _sample(model, prompts, timings[AUTO], new_tokens),
    }


def _row(
    timing: Timing, plain: Timing, transformers: Timing, kinds: Mapping[str, Sequence[int]]
) -> dict[str, float | int]:
    """The figures of one drafter."""
    row: dict[str, float | int] = {
        "tokens_per_step": round(timing.tokens_per_step, 3),
        "tokens_per_s": round(timing.tokens_per_second, 1),
        "speedup": round(timing.speedup_over(plain), 3),
        "speedup_over_transformers": round(timing.speedup_over(transformers), 3),
        "identical_outputs": run.identical(timing.outputs, plain.outputs),
    }
    for kind, prompts in kinds.items():
        row[f"tokens_per_step_{kind}"] = round(timing.of(prompts).tokens_per_step, 3)
        row[f"speedup_{kind}"] = round(timing.of(prompts).speedup_over(plain.of(prompts)), 3)
    return row


def _sample(model: MedusaModel, prompts: Sequence[list[int]], timing: Timing, new_tokens: int) -> dict[str, Any]:
    """A sample answer as (text, drafted) pieces: of long answers that ended, the one with the most tokens per step."""
    tokenizer, eos = model.base.tokenizer, model.base.eos_ids
    calls = timing.rounds[-1]
    long = [index for index, call in enumerate(calls) if len(tokenizer.decode(call.tokens)) >= SAMPLE_CHARACTERS]
    ended = [index for index in long if calls[index].tokens[-1] in eos]
    best = max(ended or long or range(len(calls)), key=lambda index: len(calls[index].tokens) / calls[index].steps)
    output = model.generate(prompts[best], max_new_tokens=new_tokens)
    pieces = [
        (tokenizer.decode([token], skip_special_tokens=True), drafted)
        for token, drafted in zip(output.tokens, output.drafted, strict=True)
    ]
    asked = tokenizer.decode(prompts[best], skip_special_tokens=True).rpartition("user\n")[2]
    return {"prompt": asked.removesuffix("assistant\n").strip(), "pieces": pieces}
