"""The benchmarks run, and what they measure is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.training.__main__ import main
from benchmarks.training.loss import OURS, OURS_KL, LossCase, measure_loss
from benchmarks.training.memory import peak_bytes
from benchmarks.training.original_way import OriginalTrainer, pad
from data.packing import pack
from data.sources import read_samples
from medusa.base.model import BaseModel
from medusa.heads import HeadsConfig, build_heads
from train import losses
from train.config import OptimRecipe
from train.features import BasePass, Positions
from train.schedule import head_weights

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
KIB = 1024


def test_peak_counts_what_is_alive_together_and_new() -> None:
    old = torch.zeros(256 * KIB // 4)

    def action() -> None:
        first = old + 1
        second = first * 2
        del first
        third = second.view(2, -1).add_(old.view(2, -1)).exp()  # a view and an in-place result are no new memory
        assert third.numel() == second.numel()

    assert peak_bytes(action, CPU) == 512 * KIB


def test_peak_counts_the_backward_pass() -> None:
    weights = torch.zeros(64 * KIB // 4, requires_grad=True)
    assert peak_bytes(lambda: weights.exp().sum().backward(), CPU) >= 128 * KIB  # the saved result and its gradient


def _peak(heads: int, positions: int, vocab: int, engine: str) -> int:
    case = LossCase(heads, positions, vocab, 16, 128, torch.float32, CPU)
    return peak_bytes(case.engines()[engine], CPU)


@pytest.mark.parametrize("engine", [OURS, OURS_KL])
def test_memory_of_the_loss_is_flat_in_heads_rows_and_vocabulary(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.row_losses.BLOCK_NUMEL", {"cpu": 1 << 15})
    monkeypatch.setattr(losses, "CHUNK_NUMEL", {"cpu": 1 << 18})
    least = _peak(1, 128, 2048, engine)
    assert least > 4 * (1 << 18)  # a chunk of logits, float32
    assert _peak(5, 128, 2048, engine) < 1.1 * least
    assert _peak(5, 256, 2048, engine) < 1.1 * least
    assert _peak(5, 256, 8192, engine) < 1.1 * least
    assert _peak(5, 256, 2048, "naive") > 5 * least


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel's counter of a process's peak memory")
def test_peak_agrees_with_the_resident_memory_of_a_process() -> None:
    # VmHWM and not getrusage: ru_maxrss starts at the peak of the process that started this one.
    program = r"""
import re, sys, torch
from pathlib import Path
from benchmarks.training.loss import LossCase
from benchmarks.training.memory import peak_bytes
cpu = torch.device("cpu")
LossCase(2, 64, 1000, 64, 64, torch.float32, cpu).engines()[sys.argv[1]]()
case = LossCase(3, 512, 32768, 64, 512, torch.float32, cpu)
def peak_kib() -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kib()
case.engines()[sys.argv[1]]()
print(1024 * (peak_kib() - before), peak_bytes(case.engines()[sys.argv[1]], cpu))
"""
    # An allocator that keeps freed memory, as launch.sh asks for, hides what is used: here each tensor is a mapping.
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    for engine in ("naive", OURS):
        answer = subprocess.run(
            [sys.executable, "-c", program, engine],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        resident, counted = map(int, answer.split())
        assert resident == pytest.approx(counted, rel=0.15, abs=2**25), engine


def test_the_original_way_has_the_same_loss_as_ours(base_directory: Path, samples: Path) -> None:
    optim, num_heads = OptimRecipe(), 3
    model = BaseModel.load(base_directory, dtype=torch.float32, device="cpu")
    chosen = read_samples(samples, model.tokenizer)[:8]
    original = OriginalTrainer(str(base_directory), torch.float32, CPU, num_heads, optim)
    for to_longest in (False, True):
        theirs = original._loss(*pad(chosen, 96, to_longest))

        packed = pack(chosen, 96)
        rows = torch.arange(len(packed))
        positions = Positions.of(packed, rows, num_heads)
        hidden = BasePass(model, packed, num_heads, 4).read(rows)
        labels = positions.targets[:, 1:]
        heads = build_heads(HeadsConfig(model.hidden_size, model.vocab_size, num_heads))
        weights = head_weights(optim, (labels >= 0).sum(0))
        ours, *_ = losses.HeadsLoss(heads, model, 64)(hidden, positions.path, labels, weights)
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=0)


def test_the_original_way_learns(base_directory: Path, samples: Path) -> None:
    model = BaseModel.load(base_directory, dtype=torch.bfloat16, device="cpu")
    original = OriginalTrainer(str(base_directory), torch.bfloat16, CPU, 2, OptimRecipe(lr=0.01))
    batch = pad(read_samples(samples, model.tokenizer)[:8], 96, to_longest=True)
    before = original._loss(*batch)
    for _ in range(5):
        original.step([batch, batch])
    assert original._loss(*batch) < before - 0.1


def test_padding_cuts_and_fills(base_directory: Path, samples: Path) -> None:
    model = BaseModel.load(base_directory, device="cpu")
    chosen = read_samples(samples, model.tokenizer)[:2]
    longest = max(len(sample.input_ids) for sample in chosen)
    assert pad(chosen, 500, to_longest=False)[0].shape == (2, 500)
    assert pad(chosen, 500, to_longest=True)[0].shape == (2, longest)
    ids, mask, labels = pad(chosen, 12, to_longest=True)
    assert ids.shape == mask.shape == labels.shape == (2, 12)
    ids, mask, labels = pad(chosen, 500, to_longest=False)
    for row, sample in enumerate(chosen):
        length = len(sample.input_ids)
        assert mask[row].sum() == length
        assert torch.equal(ids[row, :length], sample.input_ids.long())
        assert torch.equal(labels[row, :length] != -100, sample.loss_mask)
        assert (labels[row, length:] == -100).all()


def test_loss_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-heads 1 2 --positions 32 --vocab 64 --hidden 8 --loss-rows 16 --device cpu --rounds 1".split()
    files = ["--json", str(tmp_path / "new" / "loss.json"), "--picture", str(tmp_path / "loss.png")]
    assert main(["loss", *sizes, *files]) == 0
    report = json.loads((tmp_path / "new" / "loss.json").read_text())
    assert report["command"].startswith("python -m benchmarks.training loss --num-heads 1 2")
    assert report["versions"]["torch"]
    assert len(report["rows"]) == 8
    assert all(row["peak_mb"] > 0 and row["ms"] > 0 for row in report["rows"])
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert "naive, same micro-batches" in capsys.readouterr().out


def test_a_naive_loss_that_does_not_fit_is_left_out() -> None:
    naive, *others = measure_loss([1], [32], [64], 8, 16, torch.float32, CPU, rounds=1, free=0)
    assert naive["peak_mb"] is None
    assert all(row["peak_mb"] for row in others)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, base_directory: Path, samples: Path) -> Path:
    path = tmp_path_factory.mktemp("bench") / "recipe.yaml"
    values = {
        "base": {"name": str(base_directory), "dtype": "bfloat16"},
        "heads": {"num_heads": 2, "architecture": "recurrent"},
        "data": {"train": str(samples), "row_tokens": 96},
        "optim": {"rows_per_step": 8, "micro_rows": 4},
        "engine": {"device": "cpu", "zero_stage": 0},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.slow
def test_speed_command(recipe: Path, tmp_path: Path) -> None:
    json_file = tmp_path / "speed.json"
    assert main(["speed", "--recipe", str(recipe), "--rounds", "1", "--json", str(json_file)]) == 0
    rows = json.loads(json_file.read_text())["rows"]
    original, longest, own, shared, as_is = rows
    assert original["over_original"] == 1.0
    assert all(row["useful_tokens_per_s"] > 0 for row in rows)
    assert original["trained_parameters"] == own["trained_parameters"] > shared["trained_parameters"]
    assert original["positions_per_useful_token"] > longest["positions_per_useful_token"]
    assert own["positions_per_useful_token"] == as_is["positions_per_useful_token"]


def test_cache_command(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--recipe", str(recipe), "--rounds", "1", "--recipe.optim.mix_steps", "2"]
    assert main(["cache", *flags, "--json", str(tmp_path / "cache.json")]) == 0
    online, first, cached = json.loads((tmp_path / "cache.json").read_text())["rows"]
    assert online["over_online"] == 1.0
    assert all(row["epoch_s"] > 0 for row in (first, cached))
    assert "cached (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["loss", "--vocab", "0"], 2, "at least 1"),
        (["loss", "--recipe.optim.lr", "1"], 2, "unrecognized"),
        (["speed", "--recipe.optim.speed", "1"], 2, "optim.speed"),
        (["speed", "--recipe", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["cache", "--recipe.data.train", "nowhere.jsonl"], 1, "nowhere.jsonl"),
        ([], 2, "command"),
    ],
)
def test_wrong_use_and_failures_are_one_message(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(arguments)
    except SystemExit as stop:
        found = stop.code
    assert found == status
    assert message in capsys.readouterr().err


def test_launch_sh_knows_the_command() -> None:
    answer = subprocess.run([ROOT / "launch.sh", "help"], capture_output=True, text=True, check=True).stdout
    assert "\n  bench-train  " in answer
