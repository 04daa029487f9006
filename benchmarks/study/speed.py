"""What designs cost and save on this machine: the time of a draft, and the speed of whole calls beside plain decoding.

One base serves all heads, one prompt at a time; ways of decoding take turns, and speeds are compared within a round.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.study.evaluate import tree_drafters
from benchmarks.study.texts import Texts
from benchmarks.study.transcript import Transcript
from medusa import MedusaModel
from medusa.clock import alternate, seconds
from medusa.drafters import Drafter, PlainDrafter
from medusa.formats import load_heads
from serve.demo.compare import compare, medusa_engine

PROPOSALS = 16
"""Drafts, at different places of a text, whose median is one measurement."""
PLAIN = ("plain decoding", "")


def measure_speed(
    texts: Texts, heads: Mapping[str, Path], trees: Mapping[str, Any], prompts: int, rounds: int
) -> dict[str, Any]:
    """Time greedy decoding and drafts.

    Args:
        texts: The study's prompts.
        heads: Directory of each variant's heads.
        trees: Paths of each variant's static tree, for those that have one.
        prompts: So many of the study's prompts are decoded, of all lengths.
        rounds: Measurements of each way.

    Returns:
        By variant and tree ("dynamic 16"): "draft_ms", the median over rounds; "speedups" over plain decoding and
        "tokens_per_s", one per round; "tokens_per_step". Plain decoding is a variant of one tree, "".
    """
    questions = texts.questions
    base = MedusaModel.from_pretrained(None, base=questions.base).base
    ways: dict[tuple[str, str], tuple[MedusaModel, Drafter]] = {PLAIN: (MedusaModel(base), PlainDrafter())}
    for name, directory in heads.items():
        model = MedusaModel(base, load_heads(directory, dtype=base.dtype, device=base.device))
        for tree, drafter in tree_drafters(model, questions, trees.get(name)).items():
            ways[name, tree] = (model, drafter)
    every = max(1, len(questions.prompts) // prompts)  # they are sorted by length
    asked = [list(prompt) for prompt in questions.prompts[::every][:prompts]]
    answer = next(iter(texts.answers.values()))[0]
    limit = questions.max_new_tokens
    engines = {" ".join(key): medusa_engine(model, limit, drafter=drafter) for key, (model, drafter) in ways.items()}
    timings = dict(zip(ways, compare(engines, asked, rounds, shown=True).values(), strict=True))
    drafts = alternate({key: partial(draft_ms, *way, asked[0], answer) for key, way in ways.items()}, rounds)
    figures: dict[str, Any] = {}
    for (name, tree), timing in timings.items():
        figures.setdefault(name, {})[tree] = {
            "draft_ms": median(drafts[name, tree]),
            "speedups": [rate / plain for rate, plain in zip(timing.rates, timings[PLAIN].rates, strict=True)],
            "tokens_per_s": timing.rates,
            "tokens_per_step": timing.tokens_per_step,
        }
    return figures


@torch.inference_mode()
def draft_ms(model: MedusaModel, drafter: Drafter, prompt: list[int], answer: list[int]) -> float:
    """Median time of a draft for one sequence, at several places of an answer."""
    transcript = Transcript.of(model.base, [prompt], [answer])
    roots = torch.arange(int(transcript.first), int(transcript.last), device=model.base.device)[:PROPOSALS, None]
    states = [transcript.state(torch.zeros_like(root), root) for root in roots]
    return 1e3 * median(seconds(partial(drafter.propose, state), model.base.device) for state in states)
