"""The whole job in one process, on a tiny base."""

import json
import logging
import shlex
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from medusa.base.checkpoint import choose_dtype
from medusa.base.model import BaseModel
from medusa.data.packing import IGNORE, pack
from medusa.data.sources import read_samples
from medusa.formats import load_heads
from medusa.model import MedusaModel
from medusa.train import trainer
from medusa.train.base import load_base, slow_in_bfloat16
from medusa.train.config import BaseRecipe
from medusa.train.evaluate import (
    accuracy_figures,
    head_accuracy,
    held_out_prompts,
    held_out_rows,
    served_counts,
    served_figures,
)
from medusa.train.features import BasePass, Positions
from medusa.train.recipe_file import RecipeError, flatten, read_recipe
from medusa.train.run_directory import RunDirectory
from medusa.train.stop import StopRequest
from medusa.train.workers import Workers, check_same
from tests.train.jobs import Acting, assert_same_run, metrics, run

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_a_run_leaves_heads_metrics_and_its_recipe(finished: Path) -> None:
    *steps, last = metrics(finished)
    assert [line["step"] for line in steps] == list(range(1, 10))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert "heldout_top1" in steps[5]
    assert last["heldout_tokens_per_step"] >= 1.0
    names = ("samples", "top1", "top5", "top10", "acceptance")
    assert all(len(last[f"heldout_{name}"]) == 3 for name in names)
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
    with caplog.at_level(logging.INFO, "medusa.train"):
        assert run(recipe, finished) == 0
    assert "run is finished" in caplog.text


def test_another_recipe_is_refused(finished: Path, recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(recipe, finished, **{"optim.lr": 0.5}) == 2
    assert "optim.lr is 0.5, the run was started with 0.01" in caplog.text


@pytest.mark.slow
def test_cached_hidden_states_give_the_same_losses(finished: Path, recipe: Path, tmp_path: Path) -> None:
    assert run(recipe, tmp_path, **{"cache.mode": "offline"}) == 0
    assert list((tmp_path / "hidden").glob("*.safetensors"))
    assert_same_run(tmp_path, finished, tolerance=1e-5)


@pytest.mark.parametrize(
    "mixing",
    [pytest.param({"optim.mix_steps": 5}, marks=pytest.mark.slow), {"optim.mix_steps": 0, "cache.mode": "offline"}],
)
def test_mixed_steps_resume_inside_a_block(
    recipe: Path, tmp_path: Path, interrupted_at: Acting, mixing: dict[str, object]
) -> None:
    values = {**mixing, "data.heldout": "", "optim.steps": 7}
    assert run(recipe, tmp_path / "whole", **values) == 0
    with interrupted_at(5):
        assert run(recipe, tmp_path / "parts", **values) == 130
    # Another split into micro-batches changes nothing but rounding.
    assert run(recipe, tmp_path / "parts", **values, **{"engine.loss_rows": 90, "optim.micro_rows": 1}) == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole", tolerance=1e-5)


def test_heads_learn_from_prompts_too(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = {"heads.draft_vocab": 20, "optim.loss": "kl", "data.heldout": ""}
    assert run(recipe, tmp_path / "answers", **shape) == 0
    assert run(recipe, tmp_path / "all", **shape, **{"data.supervise": "all"}) == 0
    answers, everything = (metrics(tmp_path / name)[:-1] for name in ("answers", "all"))
    assert all(more["useful_tokens"] > few["useful_tokens"] for few, more in zip(answers, everything, strict=True))
    assert everything[-1]["loss"] < everything[0]["loss"] - 0.1
    ids = [load_heads(tmp_path / name / "heads").draft_ids for name in ("answers", "all")]
    assert torch.equal(*ids), "answers decide what heads can draft"
    assert run(recipe, tmp_path / "answers", **shape, **{"data.supervise": "all"}) == 2
    assert "data.supervise is 'all', the run was started with 'answers'" in caplog.text


def test_heads_learn_from_prompts_that_nobody_answered(recipe: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    asked = [f"{n} abcdefgh abcdefgh abcdefgh" for n in range(64)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked), encoding="utf-8")
    values = {"data.train": str(prompts), "data.heldout": "", "heads.draft_vocab": 20, "optim.loss": "kl"}
    assert run(recipe, tmp_path / "none", **values) == 1
    assert run(recipe, tmp_path / "all", **values, **{"data.supervise": "all"}) == 0
    *steps, _ = metrics(tmp_path / "all")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1


def test_heads_learn_tokens_that_the_tokenizer_lacks(recipe: Path, base: Path, tmp_path: Path) -> None:
    wide, data = shutil.copytree(base, tmp_path / "base"), tmp_path / "samples.jsonl"
    model = AutoModelForCausalLM.from_pretrained(base)
    count = model.config.vocab_size
    model.resize_token_embeddings(count + 7)
    model.save_pretrained(wide)
    line = {"input_ids": [*range(60), count + 6], "loss_mask": [0, *[1] * 60]}
    data.write_text(json.dumps(line) + "\n")
    values = {"base.name": wide, "data.train": data, "data.heldout": "", "optim.rows_per_step": 1, "optim.steps": 1}
    assert run(recipe, tmp_path / "run", **values) == 0


def test_own_lm_heads_and_bfloat16_train(recipe: Path, tmp_path: Path) -> None:
    values = {"heads.own_lm_heads": True, "heads.num_layers": 2, "engine.precision": "bfloat16",
              "base.dtype": "bfloat16", "data.heldout": "", "engine.zero_stage": 3}  # fmt: skip
    assert run(recipe, tmp_path, **values) == 0
    *steps, _ = metrics(tmp_path)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert load_heads(tmp_path / "heads").lm_heads is not None


def test_precision_auto_is_the_bases(recipe: Path, tmp_path: Path) -> None:
    """In stage 0 too, which the embedded recipe has and which partitions nothing."""

    def losses(base: str, precision: str) -> list[float]:
        values = {"base.dtype": base, "engine.precision": precision, "engine.zero_stage": 0, "optim.steps": 2}
        directory = tmp_path / f"{base}-{precision}"
        assert run(recipe, directory, **values, **{"data.heldout": ""}) == 0
        return [line["loss"] for line in metrics(directory) if "loss" in line]

    for base, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        assert losses(base, "auto") == losses(base, base) != losses(base, other)


@pytest.mark.parametrize("slow", [True, False])
def test_dtype_auto_is_what_this_cpu_multiplies_faster(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    def measured(products: dict[torch.dtype, object], rounds: int) -> dict[torch.dtype, list[float]]:
        return {dtype: [1.0 + slow * (dtype == torch.bfloat16)] * rounds for dtype in products}

    monkeypatch.setattr("medusa.train.base.alternate", measured)
    slow_in_bfloat16.cache_clear()
    base = load_base(BaseRecipe(), Workers.start("cpu", StopRequest()))
    assert base.dtype == (torch.float32 if slow else choose_dtype(torch.bfloat16, base.device))
    assert slow_in_bfloat16(torch.device("cuda")) is False
    slow_in_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("values", "status", "message"),
    [
        ({"data.train": "none.jsonl"}, 2, "sample file (none.jsonl) does not exist"),
        ({"base.name": "/no/such/base"}, 2, "/no/such/base"),
        ({"base.quantise": "4bit"}, 1, "base.quantise (4bit) needs a CUDA device (this is cpu) and the package"),
        ({"heads.architecture": "medsa"}, 2, "heads.architecture ('medsa') is not a choice; take one of recurrent"),
        ({"optim.lrr": 1}, 2, "did you mean optim.lr?"),
        ({"heads.draft_vocab": 258}, 2, "heads.draft_vocab (258) is more than the vocabulary of the base (257,"),
        (
            {"heads.feature_layers": 4}, 2,
                "heads.feature_layers (4) is more than the layers below the last one of the base (1,",
        ),
    ],
)  # fmt: skip
def test_wrong_use_and_failures_are_one_clear_error(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict[str, Any], status: int, message: str
) -> None:
    assert run(recipe, tmp_path, **values) == status
    assert message in caplog.text


@pytest.mark.parametrize("stage", [0, 1])
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_kept(
    recipe: Path, tmp_path: Path, before_step: Acting, caplog: pytest.LogCaptureFixture, stage: int
) -> None:
    read = BasePass.read
    with pytest.MonkeyPatch.context() as patch:
        poison = partial(patch.setattr, BasePass, "read", lambda *of: read(*of) * torch.inf)
        with before_step(4, poison):
            assert run(recipe, tmp_path, **{"engine.zero_stage": stage}) == 1
    assert "of step 5 is not finite" in caplog.text
    assert "lower optim.lr" in caplog.text
    assert RunDirectory(tmp_path).position().step == 4
    assert not (tmp_path / "heads").exists()


def test_processes_with_other_samples_or_recipes_are_refused(recipe: Path) -> None:
    ours = read_recipe(recipe)
    first = {**dict(flatten(asdict(ours))), "data.train": "fingerprint 0", "optim.micro_rows": 5, "run": "elsewhere"}

    class Second(Workers):
        def from_first(self, _: object) -> Any:
            return first

        def any(self, here: bool) -> bool:
            return here

    with pytest.raises(RecipeError) as caught:
        check_same(ours, "1a", Second(1, 2, torch.device("cpu")))
    assert "processes have different recipes or samples (process 1 and process 0: " in str(caught.value)
    assert "optim.micro_rows is 2 here, 5 there" in str(caught.value)
    assert "data.train is fingerprint 1a here, fingerprint 0 there" in str(caught.value)
    assert "elsewhere" not in str(caught.value)


def test_served_tokens_are_those_of_a_base_that_was_tested(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "choose_decoding", lambda base: base.with_traits(decoding="plain"))
    assert run(recipe, tmp_path, **{"optim.steps": 1}) == 0
    assert metrics(tmp_path)[-1]["heldout_tokens_per_step"] == 1.0


def test_known_answers_are_not_decoded_again(finished: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MedusaModel(BaseModel.load(base, dtype=torch.float32, device="cpu"), load_heads(finished / "heads"))
    prompts, answers = [[5, 9, 7], [30, 2, 30, 2], [8] * 20], {}
    outputs = [model.generate(prompt, max_new_tokens=20, nodes=4, drafter="heads") for prompt in prompts]
    first = served_counts(model, prompts, 20, 4, answers)
    assert first[:, 0].tolist() == [sum(len(o.tokens) for o in outputs), sum(o.steps for o in outputs)]
    monkeypatch.setattr(MedusaModel, "generate", None)
    assert torch.equal(served_counts(model, prompts, 20, 4, answers), first)
    figures = served_figures(first)
    assert figures["tokens_per_step"] == sum(len(o.tokens) for o in outputs) / sum(o.steps for o in outputs)
    assert len(figures["acceptance"]) == 3


def test_a_directory_in_use_is_refused(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunDirectory(tmp_path).locked():
        assert run(recipe, tmp_path) == 1
    assert "is in use by another process" in caplog.text


def test_head_accuracy_counts_ranks_and_samples_per_head(finished: Path, base: Path, samples: Path) -> None:
    model = BaseModel.load(base, dtype=torch.float32, device="cpu")
    heads = load_heads(finished / "heads")
    packed = pack(read_samples(samples, model.tokenizer)[:5], row_tokens=96)
    rows = torch.arange(len(packed))
    figures = accuracy_figures(head_accuracy(model, heads, packed, rows, batch_rows=2))
    positions = Positions.of(packed, rows, 3)
    labels = positions.targets[:, 1:]
    with torch.no_grad():
        features = heads(BasePass(model, packed, 3, 2).read(rows), positions.path, model)
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
    assert accuracy_figures(counts)["top10"] == [0, 0, 0]


def test_held_out_prompts_end_before_the_answer(base: Path, samples: Path) -> None:
    tokenizer = BaseModel.load(base, device="cpu").tokenizer
    documents = read_samples(samples, tokenizer)
    prompts = held_out_prompts(documents, count=3, longest=100)
    assert [tokenizer.decode(prompt) for prompt in prompts] == [f"say {n}<end>" for n in (0, 21, 42)]
    assert held_out_prompts(documents, count=1, longest=4) == [prompts[0][:4]]


def test_held_out_rows_are_spread_over_all_of_them() -> None:
    assert held_out_rows(10, 4).tolist() == [0, 2, 5, 7]
    assert held_out_rows(3, 64).tolist() == held_out_rows(3, 0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_a_full_memory_is_one_sentence(
    recipe: Path, tmp_path: Path, before_step: Acting, caplog: pytest.LogCaptureFixture, error: RuntimeError
) -> None:
    def fail() -> None:
        raise error

    with before_step(0, fail):
        assert run(recipe, tmp_path) == 1
    assert "memory ran out; lower optim.micro_rows" in caplog.text
