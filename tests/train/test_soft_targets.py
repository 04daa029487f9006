"""Soft targets through the trainer: each head learns what the base says at its own place."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from data.packing import IGNORE, pack
from data.sources import read_samples
from medusa.base_model import BaseModel
from train.__main__ import main
from train.schedule import rows_of_step

HEADS = 3


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def _distances(kind: str, base: Path, samples: Path) -> list[float]:
    """Mean distance per head between the base at t+k, the target, and at t, which is what fresh heads say."""
    model = BaseModel.load(base, dtype=torch.float32, device="cpu")
    packed = pack(read_samples(str(samples), model.tokenizer), 96)
    rows = rows_of_step(0, 0, 8, len(packed))
    with torch.no_grad():
        logits = model.logits(model.hidden_states(packed.input_ids[rows].long(), packed.position_ids[rows].long()))
    targets, found = packed.targets(rows, HEADS), [[] for _ in range(HEADS)]
    for row, position, column in (targets != IGNORE).nonzero().tolist():
        if column:
            p, q = logits[row, position + column].log_softmax(0), logits[row, position].log_softmax(0)
            kl, tv = (p.exp() * (p - q)).sum(), (p.exp() - q.exp()).abs().sum() / 2
            found[column - 1].append(kl if kind == "kl" else tv)
    return [float(torch.stack(values).mean()) for values in found]


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_heads_start_at_the_distance_from_the_base_and_come_closer(
    kind: str, tmp_path: Path, base: Path, samples: Path
) -> None:
    recipe = {
        "run": str(tmp_path / "run"),
        "base": {"name": str(base), "dtype": "float32"},
        "heads": {"num_heads": HEADS},
        "data": {"train": str(samples), "row_tokens": 96},
        "optim": {"lr": 0.03, "rows_per_step": 8, "micro_rows": 4, "steps": 12, "loss": kind, "warmup": 0.0},
        "engine": {"device": "cpu", "loss_rows": 100},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["--recipe", str(path)]) == 0
    *steps, _ = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["head_loss"] == pytest.approx(_distances(kind, base, samples), rel=1e-4)
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
