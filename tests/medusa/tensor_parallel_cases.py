"""What a model says in many ways: ``python -m tests.medusa.tensor_parallel_cases``, under torchrun too."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from medusa import MedusaModel, SamplingParams, Speculation
from tests.medusa.passes import finish

TEXT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    ret"
PROMPTS = [TEXT, "x", "The quick brown fox jumps over the lazy dog. " * 3]
DRAFTERS = ("heads", "prompt-lookup", "hybrid", "early-exit", "draft-model")
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
SETTINGS = {"greedy": {}, "sampled": SAMPLED, "speculative": SAMPLED | {"acceptance": "speculative"}}


def load(base: str, heads: str, attention: str, small: str) -> MedusaModel:
    """In float32; divided where there are several processes."""
    options = {"tp_plan": "auto"} if "RANK" in os.environ else None
    return MedusaModel.from_pretrained(
        heads, base, torch.float32, "cpu", attention, load_options=options, draft_model=small
    )


def said(model: MedusaModel) -> dict[str, Any]:
    """Tokens of completions by the way in which they were made, and among how many processes."""
    ways = {
        f"{drafter}, {name}": {"drafter": drafter, "nodes": 8} | setting
        for drafter in DRAFTERS
        for name, setting in SETTINGS.items()
    }
    ways |= {f"plain, {name}": {"nodes": 1} | SETTINGS[name] for name in ("greedy", "sampled")}
    with patch("medusa.cache.pool.RESERVED", 64):  # caches grow
        outputs = {name: model.generate(PROMPTS, max_new_tokens=24, **way) for name, way in ways.items()}
    tokens = {name: [output.tokens for output in each] for name, each in outputs.items()}
    return tokens | {"joins": joins(model), "ranks": model.base.ranks}


def joins(model: MedusaModel) -> list[list[int]]:
    """Requests that come while others are decoded, and leave before these end, in a cache that holds some of them."""
    batch, outputs = model.batch(model.base.new_pool(352)), []
    for number, prompt in enumerate(PROMPTS * 3):
        text = model.base.tokenizer.encode(f"{number} {prompt}")
        params = SamplingParams(max_new_tokens=24 + 8 * (number % 3))
        outputs.append(batch.add(text, params, Speculation(drafter="heads", nodes=8)).output)
        batch.step()
    assert batch.waiting, "the cache is too small"
    finish(batch)
    return [output.tokens for output in outputs]


if __name__ == "__main__":
    *names, out = sys.argv[1:]
    torch.set_num_threads(1)
    model = load(*names)
    Path(out).write_text(json.dumps(said(model)), encoding="utf-8")
