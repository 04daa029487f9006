"""What steps should take on GPUs: the page says what the command prints, and measured steps stand beside it."""

import json
from pathlib import Path

import pytest

from medusa import MedusaModel
from medusa.benchmarks.gpu.paper import beside, card_of, key_figure, main, measured
from medusa.benchmarks.step.shapes import random_base, random_heads
from medusa.budget.bound import CARDS, READS, Card

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
MARKS = ("<!-- python -m medusa.benchmarks.gpu.paper -->", "<!-- end -->")


def test_the_page_holds_what_the_command_prints(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out.strip()
    _, _, rest = PAGE.read_text().partition(MARKS[0])
    assert rest.partition(MARKS[1])[0].strip() == printed, (
        "run python -m medusa.benchmarks.gpu.paper, and put it into the page"
    )


def test_measured_steps_stand_beside_their_bounds():
    where = {"batch": 16, "context": 2048}
    report = {
        "device": "NVIDIA H100 80GB HBM3",
        "bounds": "H100 SXM",
        "rows": [
            where | {"nodes": 1, "bound_ms": 6.4, "verify_ms": 8.0, "step_ms": 8.5},
            where | {"nodes": 64, "bound_ms": 24.0, "verify_ms": 48.0, "step_ms": 50.25},
            {"batch": 64, "context": 32_768, "nodes": 1},
        ],
    }
    assert beside(report).splitlines() == [
        "NVIDIA H100 80GB HBM3, bounds of H100 SXM",
        "batch context nodes  bound ms verify ms  of it   step ms",
        "   16    2048     1      6.40      8.00    80%      8.50",
        "   16    2048    64     24.00     48.00    50%     50.25",
        "   64   32768     1 does not fit",
    ]
    assert key_figure(report) == "2 steps, verified at 50% to 80% of their bound"


def test_cards_are_known_by_their_whole_name():
    assert card_of("NVIDIA L4", 1, 1.0) == CARDS[-1]._replace(memory=1)
    other = card_of("NVIDIA L40S", 48, 8e11)
    assert READS * other.bandwidth == pytest.approx(8e11)
    assert other.memory == 48


def test_steps_that_fit_are_measured_and_others_left_out(base_directory):
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base_directory)
    base = random_base(config, torch.float32, torch.device("cpu"))
    model, shapes = MedusaModel(base, random_heads(base, "recurrent", 2)), [(2, 16), (10**6, 16)]
    card = Card("made up", "", 10**9, 1e9, 1e12)
    rows = list(measured(model, card, shapes, nodes=(1, 4), rounds=1))
    sizes = [(row["batch"], row["context"], row["nodes"]) for row in rows]
    assert sizes == [(batch, 16, nodes) for batch in (2, 10**6) for nodes in (1, 4)]
    assert all(row[name] > 0 for row in rows[:2] for name in ("bound_ms", "verify_ms", "step_ms"))
    assert not any("step_ms" in row for row in rows[2:])
    assert json.loads(json.dumps(rows)) == rows


def test_measuring_needs_a_gpu(tmp_path, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--measure", str(tmp_path / "x.json")]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err
