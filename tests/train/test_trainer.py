"""The whole job in one process, on a tiny base."""

import json
import logging
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from data import resolve_base_name
from data.packing import IGNORE, PackedRows, pack
from data.sources import read_samples
from medusa.base.checkpoint import choose_dtype
from medusa.base.model import BaseModel
from medusa.formats import load_heads
from tests.train.jobs import metrics
from train import setup
from train.__main__ import main
from train.config import BaseRecipe
from train.evaluate import accuracy_figures, head_accuracy, held_out_prompts, held_out_rows
from train.features import BasePass, Positions
from train.number_format import slow_in_bfloat16
from train.run_directory import RunDirectory
from train.trainer import Trainer
from train.workers import Workers

pytestmark = pytest.mark.usefixtures("no_pictures")
Interrupting = Callable[[int], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, base: Path, samples: Path, heldout: Path) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    values = {
        "run": str(path.parent / "run"),
        "base": {"name": str(base), "dtype": "float32"},
        "heads": {"num_heads": 3},
        "data": {"train": str(samples), "heldout": str(heldout), "row_tokens": 96},
        "optim": {"lr": 0.01, "rows_per_step": 8, "micro_rows": 4, "steps": 9},
        "engine": {"device": "cpu"},
        "evaluate": {"prompts": 2, "max_new_tokens": 8, "nodes": 4, "every_steps": 6},
        "log": {"checkpoint_steps": 4},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    assert main(["--recipe", str(recipe)]) == 0
    return recipe.parent / "run"


def test_a_run_leaves_heads_metrics_and_its_recipe(finished: Path) -> None:
    *steps, last = metrics(finished)
    assert [line["step"] for line in steps] == list(range(1, 10))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert "heldout_top1" in steps[5]
    assert last["heldout_tokens_per_step"] >= 1.0
    assert all(len(last[name]) == 3 for name in ("heldout_samples", "heldout_top1", "heldout_top5", "heldout_top10"))
    heads = load_heads(finished / "heads")
    assert all(parameter.any() for parameter in heads.parameters())
    provenance = json.loads((finished / "heads" / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["recipe"] == yaml.safe_load((finished / "recipe.yaml").read_text(encoding="utf-8"))
    assert provenance["figures"] == last
    assert provenance["totals"]["useful_tokens"] == sum(line["useful_tokens"] for line in steps)
    assert provenance["data"]["fingerprint"] == RunDirectory(finished).position().data
    assert provenance["base"] == {"name": provenance["recipe"]["base"]["name"], "revision": None, "training": "frozen"}
    assert "deepspeed" in provenance["versions"]
    assert provenance["command"] == shlex.join(sys.orig_argv)
    report = json.loads((finished / "training.json").read_text(encoding="utf-8"))
    assert report["evaluations"][-1]["heldout_tokens_per_step"] == last["heldout_tokens_per_step"]


def test_a_finished_run_says_so(finished: Path, recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "train"):
        assert main(["--recipe", str(recipe)]) == 0
    assert "run is finished" in caplog.text


def test_another_recipe_is_refused(finished: Path, recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--recipe", str(recipe), "--recipe.optim.lr", "0.5"]) == 2
    assert "optim.lr is 0.5, the run was started with 0.01" in caplog.text


def test_an_interrupted_run_resumes_exactly(
    finished: Path, recipe: Path, tmp_path: Path, interrupted_at: Interrupting
) -> None:
    arguments = ["--recipe", str(recipe), "--recipe.run", str(tmp_path)]
    with interrupted_at(6):
        assert main(arguments) == 130
    position = RunDirectory(tmp_path).position()
    assert position is not None
    assert position.step == 4
    # Another split into micro-batches changes nothing but rounding.
    assert main([*arguments, "--recipe.optim.micro_rows", "2"]) == 0

    for ours, theirs in zip(metrics(tmp_path), metrics(finished), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=1e-5)
    expected = load_heads(finished / "heads").state_dict()
    for name, value in load_heads(tmp_path / "heads").state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["hybrid", pytest.param("offline", marks=pytest.mark.slow)])
def test_cached_hidden_states_give_the_same_losses(finished: Path, recipe: Path, tmp_path: Path, mode: str) -> None:
    arguments = ["--recipe", str(recipe), "--recipe.run", str(tmp_path), "--recipe.cache.mode", mode]
    assert main(arguments) == 0
    assert list((tmp_path / "hidden").glob("*.safetensors"))
    for ours, theirs in zip(metrics(tmp_path), metrics(finished), strict=True):
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=1e-5)


def test_mixed_steps_resume_inside_a_block(recipe: Path, tmp_path: Path, interrupted_at: Interrupting) -> None:
    flags = ["--recipe", str(recipe), "--recipe.optim.mix_steps", "5", "--recipe.data.heldout", ""]
    assert main([*flags, "--recipe.run", str(tmp_path / "whole")]) == 0
    with interrupted_at(6):
        assert main([*flags, "--recipe.run", str(tmp_path / "parts")]) == 130
    assert main([*flags, "--recipe.run", str(tmp_path / "parts"), "--recipe.engine.loss_rows", "90"]) == 0
    for ours, theirs in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True):
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=1e-5)


@pytest.mark.parametrize("kind", ["kl", pytest.param("tv", marks=pytest.mark.slow)])
def test_the_base_teaches_its_own_distribution(finished: Path, recipe: Path, tmp_path: Path, kind: str) -> None:
    flags = ["--recipe.optim.loss", kind, "--recipe.optim.mix_steps", "3", "--recipe.optim.lr", "0.003"]
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path), *flags]) == 0
    *steps, _ = metrics(tmp_path)
    assert 0 < steps[-1]["loss"] < steps[0]["loss"] - 0.01
    assert steps[0]["loss"] != metrics(finished)[0]["loss"]


def test_own_lm_heads_and_bfloat16_train(recipe: Path, tmp_path: Path) -> None:
    overrides = {"heads.own_lm_heads": "true", "heads.num_layers": "2", "engine.precision": "bfloat16",
                 "base.dtype": "bfloat16", "data.heldout": "", "engine.zero_stage": "3"}  # fmt: skip
    flags = [text for key, value in overrides.items() for text in (f"--recipe.{key}", value)]
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path), *flags]) == 0
    *steps, _ = metrics(tmp_path)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert load_heads(tmp_path / "heads").lm_heads is not None


def test_precision_auto_is_the_bases(recipe: Path, tmp_path: Path) -> None:
    """In stage 0 too, which the embedded recipe has and which partitions nothing."""

    def losses(base: str, precision: str) -> list[float]:
        values = {"base.dtype": base, "engine.precision": precision, "engine.zero_stage": "0", "optim.steps": "3",
                  "data.heldout": "", "run": str(tmp_path / f"{base}-{precision}")}  # fmt: skip
        flags = [text for key, value in values.items() for text in (f"--recipe.{key}", value)]
        assert main(["--recipe", str(recipe), *flags]) == 0
        return [line["loss"] for line in metrics(Path(values["run"])) if "loss" in line]

    for base, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        assert losses(base, "auto") == losses(base, base) != losses(base, other)


@pytest.mark.parametrize("slow", [True, False])
def test_dtype_auto_is_what_this_cpu_multiplies_faster(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    monkeypatch.setattr(setup, "slow_in_bfloat16", lambda device: slow)
    workers: Any = SimpleNamespace(device=torch.device("cpu"), from_first=lambda make: make())
    base = setup.load_base(str(resolve_base_name("embedded")), BaseRecipe(), workers)
    assert base.dtype == (torch.float32 if slow else choose_dtype(torch.bfloat16, workers.device))


def test_a_slow_number_format_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(products: dict[torch.dtype, object], rounds: int) -> dict[torch.dtype, list[float]]:
        return {dtype: [slower[dtype]] * rounds for dtype in products}

    monkeypatch.setattr("train.number_format.alternate", measured)
    cpu = torch.device("cpu")
    for seconds, expected in ((2.0, True), (0.5, False)):
        slower = {torch.float32: 1.0, torch.bfloat16: seconds}
        assert slow_in_bfloat16.__wrapped__(cpu) is expected
    assert slow_in_bfloat16.__wrapped__(torch.device("cuda")) is False


@pytest.mark.parametrize(
    ("overrides", "status", "message"),
    [
        (
            ["--recipe.lora.rank", "4", "--recipe.optim.mix_steps", "2"],
            2,
            "optim.mix_steps (2) needs a base",
        ),
        (["--recipe.data.train", "none.jsonl"], 1, "sample file (none.jsonl) does not exist"),
        (["--recipe.base.name", "/no/such/base"], 1, "/no/such/base"),
        (["--recipe.heads.architecture", "medsa"], 1, "head architecture ('medsa') is not known"),
        (["--recipe.optim.lrr", "1"], 2, "did you mean optim.lr?"),
        (["--what"], 2, "argument (--what) is unknown"),
    ],
)
def test_wrong_use_and_failures_are_one_clear_error(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, overrides: list[str], status: int, message: str
) -> None:
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path), *overrides]) == status
    assert message in caplog.text


def test_check_reads_the_recipe_only(recipe: Path, tmp_path: Path) -> None:
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path / "run"), "--check"]) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", ["0", "1"])
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_kept(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    read = BasePass.read

    def poisoned(source: BasePass, rows_B: torch.Tensor) -> torch.Tensor:
        return read(source, rows_B) * (torch.inf if (tmp_path / "checkpoints" / "latest").is_file() else 1.0)

    monkeypatch.setattr(BasePass, "read", poisoned)
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path), "--recipe.engine.zero_stage", stage]) == 1
    assert "of step 5 is not finite" in caplog.text
    assert "lower optim.lr" in caplog.text
    position = RunDirectory(tmp_path).position()
    assert position is not None
    assert position.step == 4
    assert not (tmp_path / "heads").exists()


def test_processes_with_other_samples_or_recipes_are_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from_first = Workers.from_first

    def elsewhere(workers: Workers, make: Callable[[], Any]) -> Any:
        made = from_first(workers, make)
        other = {"data.train": "fingerprint 0", "optim.micro_rows": 5}
        return made | other if isinstance(made, dict) else made

    monkeypatch.setattr(Workers, "from_first", elsewhere)
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path)]) == 2
    assert "optim.micro_rows is 4 here, 5 there" in caplog.text
    assert ", fingerprint 0 there" in caplog.text


def test_served_tokens_are_those_of_a_base_that_was_tested(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = lambda base: base.with_traits(decoding="plain")  # noqa: E731
    monkeypatch.setattr(setup, "choose_decoding", plainly)
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path)]) == 0
    assert metrics(tmp_path)[-1]["heldout_tokens_per_step"] == 1.0


def test_a_directory_in_use_is_refused(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunDirectory(tmp_path).locked():
        assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path)]) == 1
    assert "is in use by another process" in caplog.text


def _heads_inputs(base: BaseModel, packed: PackedRows, num_heads: int) -> tuple[torch.Tensor, ...]:
    rows = torch.arange(len(packed))
    positions = Positions.of(packed, rows, num_heads)
    return BasePass(base, packed, num_heads, 2).read(rows), positions.path, positions.targets[:, 1:]


def test_packed_documents_do_not_see_each_other(base: Path, samples: Path) -> None:
    model = BaseModel.load(base, dtype=torch.float32, device="cpu")
    documents = read_samples(samples, model.tokenizer)[:3]
    hidden, paths, labels = _heads_inputs(model, pack(documents, row_tokens=256), num_heads=2)
    alone = [_heads_inputs(model, pack([one], 256), 2) for one in documents]
    # Best fit packs the longest document first.
    order = sorted(range(3), key=lambda index: -len(documents[index].input_ids))
    torch.testing.assert_close(hidden, torch.cat([alone[index][0] for index in order]), rtol=0, atol=1e-5)
    assert torch.equal(labels, torch.cat([alone[index][2] for index in order]))
    # What a head with a label reads is in its document: the next token for head 1, for head 2 one more.
    expected = torch.cat([alone[index][1] for index in order])
    for head in range(2):
        valid = labels[:, head] != IGNORE
        assert torch.equal(paths[valid, : head + 1], expected[valid, : head + 1])


def test_head_accuracy_counts_ranks_and_samples_per_head(finished: Path, base: Path, samples: Path) -> None:
    model = BaseModel.load(base, dtype=torch.float32, device="cpu")
    heads = load_heads(finished / "heads")
    packed = pack(read_samples(samples, model.tokenizer)[:5], row_tokens=96)
    rows = torch.arange(len(packed))
    figures = accuracy_figures(head_accuracy(model, heads, packed, rows, batch_rows=2))
    hidden, paths, labels = _heads_inputs(model, packed, 3)
    with torch.no_grad():
        features = heads(hidden, paths, model)
        best = torch.stack([heads.head_logits(head, features[head], model) for head in range(3)]).topk(10).indices
    for head in range(3):
        valid = labels[:, head] != IGNORE
        hits = best[head, valid] == labels[valid, head, None]
        assert figures["samples"][head] == valid.sum()
        for rank in (1, 5, 10):
            assert figures[f"top{rank}"][head] == pytest.approx(hits[:, :rank].any(1).float().mean().item())


def test_a_process_without_a_held_out_row_counts_nothing(base: Path, samples: Path, finished: Path) -> None:
    model = BaseModel.load(base, dtype=torch.float32, device="cpu")
    packed = pack(read_samples(samples, model.tokenizer)[:1], row_tokens=96)
    counts = head_accuracy(model, load_heads(finished / "heads"), packed, torch.arange(1)[1::2], batch_rows=2)
    assert not counts.any()


def test_held_out_prompts_end_before_the_answer(base: Path, samples: Path) -> None:
    tokenizer = BaseModel.load(base, device="cpu").tokenizer
    documents = read_samples(samples, tokenizer)
    prompts = held_out_prompts(documents, count=3, longest=100)
    assert [tokenizer.decode(prompt) for prompt in prompts] == [f"say {n}<end>" for n in (0, 21, 42)]
    assert held_out_prompts(documents, count=1, longest=4) == [prompts[0][:4]]


def test_held_out_rows_are_spread_over_all_of_them() -> None:
    assert held_out_rows(10, 4).tolist() == [0, 2, 5, 7]
    assert held_out_rows(3, 64).tolist() == held_out_rows(3, 0).tolist() == [0, 1, 2]


def test_machines_with_other_rows_are_told_so(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_first = Workers.from_first

    def of_another(workers: Workers, make: Callable[[], Any]) -> Any:
        made = from_first(workers, make)
        return made | {"data.train": "fingerprint 0"} if isinstance(made, dict) else made

    monkeypatch.setattr(Workers, "from_first", of_another)
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path / "run")]) == 2
    assert "processes have different recipes or samples" in caplog.text
    assert "data.train is fingerprint" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_a_full_memory_is_one_sentence(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def fails(_: Trainer) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(Trainer, "train_step", fails)
    assert main(["--recipe", str(recipe), "--recipe.run", str(tmp_path / "run")]) == 1
    assert "memory ran out; lower optim.micro_rows" in caplog.text
