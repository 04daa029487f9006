"""Joint training (Medusa-2) as a whole run in one process, on a tiny base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa import MedusaModel
from medusa.train.recipe_file import RecipeError, build_recipe, read_recipe
from medusa.train.run_directory import RunDirectory
from medusa.train.stop import StopRequest
from medusa.train.trainer import Trainer
from medusa.train.workers import Workers
from tests.train.jobs import Acting, assert_same_run, finish, metrics, run, train, write_recipe

STEPS, RESTING = 12, 4


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, base: Path, samples: Path, heldout: Path) -> Path:
    sections = {
        "heads": {"num_heads": 2},
        "data": {"heldout": str(heldout)},
        "optim": {"lr": 0.02, "rows_per_step": 6, "steps": STEPS, "weight_decay": 0.1},
        "lora": {"rank": 4, "dropout": 0.1, "heads_only": RESTING / STEPS, "base_loss": "ce"},
        "evaluate": {"prompts": 2, "max_new_tokens": 8, "nodes": 4, "every_steps": 6, "rows": 4},
        "log": {"checkpoint_steps": RESTING, "keep": 9},
    }
    return write_recipe(tmp_path_factory.mktemp("joint") / "recipe.yaml", base, samples, sections)


@pytest.fixture(scope="module")
def finished(recipe: Path, no_pictures: None) -> Path:
    assert run(recipe, recipe.parent / "run") == 0
    return recipe.parent / "run"


def test_the_base_learns_after_its_rest_and_the_result_says_so(finished: Path) -> None:
    *steps, last = metrics(finished)
    assert ["base_loss" in line for line in steps] == [step >= RESTING for step in range(STEPS)]
    assert steps[-1]["base_loss"] < steps[RESTING]["base_loss"] - 0.1
    assert steps[-1]["head_loss"][0] < steps[0]["head_loss"][0] - 0.1
    assert "heldout_top1" in steps[5]
    assert last["heldout_tokens_per_step"] >= 1.0
    provenance = json.loads((finished / "heads" / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["base"]["training"].startswith("changed by adapter/")
    assert json.loads((finished / "heads" / "config.json").read_text(encoding="utf-8"))["base_adapter"] == "adapter"


def test_checkpoints_hold_what_is_trained_and_adapters_do_not_move_while_they_rest(finished: Path) -> None:
    early, late = (
        load_file(next((finished / "checkpoints" / f"step-{step}").glob("*.safetensors"))) for step in (RESTING, STEPS)
    )
    assert early.keys() == late.keys()
    parameters = {name for name in early if name.startswith("parameter/")}
    assert {name.split("/")[1].split(".")[0] for name in parameters} == {"heads", "adapters"}
    for name in parameters:
        if "lora_B" in name:
            assert not early[name].any()
            assert late[name].any()
    for name in early:
        if "adapters" in name and name.startswith("exp_avg"):
            assert not early[name].any()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [7, 3])
def test_an_interrupted_run_resumes_exactly(
    finished: Path, recipe: Path, tmp_path: Path, interrupted_at: Acting, stop: int
) -> None:
    with interrupted_at(stop):
        assert run(recipe, tmp_path, **{"log.checkpoint_steps": 2}) == 130
    assert run(recipe, tmp_path, **{"log.checkpoint_steps": 2}) == 0
    assert_same_run(tmp_path, finished, tolerance=1e-6)


def test_the_loaded_model_decodes_as_the_trained_one(finished: Path, recipe: Path, tmp_path: Path) -> None:
    model = MedusaModel.from_pretrained(finished / "heads", dtype=torch.float32, device="cpu")
    assert model.base.adapter
    read = read_recipe(recipe, {"run": str(finished)})
    trainer = Trainer(read, RunDirectory(finished), Workers.start("cpu", StopRequest()))  # as it stands at its end
    prompts = [model.base.tokenizer(f"say {n}<end>").input_ids for n in range(3)]
    for prompt in prompts:
        greedy = trainer.base.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert model.generate(prompt, max_new_tokens=12).tokens == greedy[0, len(prompt) :].tolist()
    ids = torch.tensor(prompts)[:, :6]
    expected = trainer.base.hidden_states(ids)
    torch.testing.assert_close(model.base.hidden_states(ids), expected, rtol=0, atol=1e-5)
    copy = MedusaModel.from_pretrained(model.save_pretrained(tmp_path), dtype=torch.float32, device="cpu")
    torch.testing.assert_close(copy.base.hidden_states(ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("engine.zero_stage", 3, "engine.zero_stage (3) cannot split adapters"),
        ("cache.mode", "offline", "cache.mode (offline) keeps hidden states"),
        ("optim.mix_steps", 2, "optim.mix_steps (2) needs a base that stays the same"),
        ("base.shard", True, "base.shard holds a frozen base"),
    ],
)
def test_what_adapters_forbid_is_one_clear_error(key: str, value: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_recipe({"data.train": "x", "lora.rank": 4, key: value})
    assert message in str(caught.value)
    assert build_recipe({"data.train": "x", key: value})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"engine.zero_stage": 0}, {"engine.zero_stage": 2, "engine.offload": "true"}])
def test_every_stage_ends_the_same(finished: Path, recipe: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert run(recipe, tmp_path, **options) == 0
    assert_same_run(tmp_path, finished, tolerance=1e-5)


@pytest.mark.slow
def test_half_precision_own_vocabularies_and_soft_targets_train(recipe: Path, tmp_path: Path) -> None:
    options = {"base.dtype": "bfloat16", "engine.precision": "bfloat16", "heads.own_lm_heads": "true",
               "optim.loss": "kl", "lora.base_loss": "kl", "lora.heads_schedule": "sine"}  # fmt: skip
    assert run(recipe, tmp_path, **options) == 0
    *steps, _ = metrics(tmp_path)
    assert steps[-1]["head_loss"][0] < steps[0]["head_loss"][0]
    assert all(0.0 <= line["base_loss"] < 0.5 for line in steps[RESTING:])
    assert load_file(tmp_path / "heads" / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
def test_two_processes_with_unequal_shares_end_like_one(recipe: Path, tmp_path: Path) -> None:
    options = {"optim.rows_per_step": 5, "optim.micro_rows": 1, "evaluate.every_steps": 0}
    assert run(recipe, tmp_path / "one", **options) == 0
    finish(train(recipe, tmp_path / "two", options))
    assert_same_run(tmp_path / "two", tmp_path / "one", tolerance=1e-5)
