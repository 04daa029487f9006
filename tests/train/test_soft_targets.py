"""Soft targets through the trainer: each head learns what the base says at its own place."""

from pathlib import Path

import pytest
import torch

from medusa.base.model import BaseModel
from medusa.data.packing import IGNORE, pack
from medusa.data.sources import read_samples
from medusa.train.schedule import rows_of_step
from tests.train.jobs import metrics, run, write_recipe

HEADS = 3


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


@pytest.mark.parametrize("kind", ["kl", pytest.param("tv", marks=pytest.mark.slow)])
def test_fresh_heads_are_as_far_from_the_base_as_it_is_from_itself(
    kind: str, tmp_path: Path, base: Path, samples: Path
) -> None:
    sections = {"optim": {"micro_rows": 4, "steps": 1, "loss": kind}, "engine": {"loss_rows": 100}}
    assert run(write_recipe(tmp_path / "recipe.yaml", base, samples, sections), tmp_path / "run") == 0
    assert metrics(tmp_path / "run")[0]["head_loss"] == pytest.approx(_distances(kind, base, samples), rel=1e-4)
