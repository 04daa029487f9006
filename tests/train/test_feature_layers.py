"""Training heads that read several layers: the whole job on a tiny base of four layers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.packing import pack
from data.sources import read_samples
from medusa import BaseModel, MedusaModel
from tests.train.jobs import Acting, metrics, run, write_recipe
from train.blocks import Block
from train.config import OptimRecipe
from train.features import BasePass
from train.hidden_cache import identity

pytestmark = pytest.mark.usefixtures("no_pictures")

LAYERS = (1, 3)
"""Two, spread below the last of four."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=256, eos_token_id=0, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("deep")
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, deep: Path, samples: Path, heldout: Path) -> Path:
    sections = {
        "heads": {"num_heads": 2, "feature_layers": 2, "architecture": "recurrent"},
        "data": {"heldout": str(heldout)},
        "optim": {"micro_rows": 4, "steps": 6, "mix_steps": 3},
        "evaluate": {"prompts": 2, "max_new_tokens": 8, "nodes": 4, "rows": 4},
        "log": {"checkpoint_steps": 4},
    }
    return write_recipe(tmp_path_factory.mktemp("recipe") / "recipe.yaml", deep, samples, sections)


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    assert run(recipe, recipe.parent / "run") == 0
    return recipe.parent / "run"


def test_trained_heads_read_their_layers_and_decode(finished: Path) -> None:
    *steps, last = metrics(finished)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert last["heldout_tokens_per_step"] >= 1.0
    model = MedusaModel.from_pretrained(finished / "heads", dtype=torch.float32, device="cpu")
    assert model.heads is not None
    assert model.heads.fusion is not None
    assert model.heads.config.feature_layers == model.base.feature_layers == LAYERS
    assert model.heads.fusion.weight.any(), "it starts at zero"
    for temperature in (0.0, 1.0):
        drafted, plain = (
            model.generate(["say 1", "say 23"], max_new_tokens=16, nodes=nodes, temperature=temperature, seed=3)
            for nodes in (8, 1)
        )
        assert [output.tokens for output in drafted] == [output.tokens for output in plain]


def test_an_interrupted_run_resumes_from_a_cache_of_all_layers(
    finished: Path, recipe: Path, tmp_path: Path, interrupted_at: Acting, caplog: pytest.LogCaptureFixture
) -> None:
    cache = {"cache.mode": "hybrid", "cache.directory": tmp_path / "hidden"}
    with interrupted_at(5):
        assert run(recipe, tmp_path / "run", **cache) == 130
    assert run(recipe, tmp_path / "run", **cache) == 0
    shard = load_file(next((tmp_path / "hidden").glob("*.safetensors")))
    assert shard["hidden"].shape[1] == 3 * 16
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(finished), strict=True):
        assert ours.get("loss") == pytest.approx(theirs.get("loss"), abs=1e-5)
    assert run(recipe, tmp_path / "other", **cache, **{"heads.feature_layers": 1}) == 1
    assert "belongs to something else: layers is [2], the states have [1, 3]; delete it or give another" in caplog.text


def test_another_number_of_layers_is_another_run(
    finished: Path, recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(recipe, finished, **{"heads.feature_layers": 0}) == 2
    assert "heads.feature_layers is 0, the run was started with 2" in caplog.text


def test_more_layers_than_the_base_has_are_one_clear_error(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(recipe, tmp_path, **{"heads.feature_layers": 4}) == 1
    assert "feature layers (4) are more than the layers below the last one of the base (3); read fewer" in caplog.text


@pytest.mark.parametrize("loss", ["kl", pytest.param("tv", marks=pytest.mark.slow)])
def test_soft_targets_are_those_of_the_last_hidden_state(deep: Path, samples: Path, loss: str) -> None:
    untapped = BaseModel.load(deep, dtype=torch.float32, device="cpu")
    packed, optim = pack(read_samples(samples, untapped.tokenizer), 96), OptimRecipe(rows_per_step=4, loss=loss)

    def teachers(base: BaseModel) -> torch.Tensor:
        states = BasePass(base, packed, num_heads=2, micro_rows=2)
        block = Block(optim, packed, 2, first=0, steps=1, rank=0, world_size=1, hidden_size=base.hidden_size)
        found = [batch.teacher for batch, _ in block.micro_batches(0, states, size=40)]
        return torch.cat([teacher for teacher in found if teacher is not None])

    ours = teachers(untapped.tapped(LAYERS))
    assert ours.shape[1] == 16
    assert torch.equal(ours, teachers(untapped))


def test_states_without_layers_are_named_as_before_there_were_any(deep: Path, samples: Path) -> None:
    base = BaseModel.load(deep, dtype=torch.float32, device="cpu")
    known = identity(base, pack(read_samples(samples, base.tokenizer), 96), 2)
    assert list(known) == ["format", "base", "config", "tokenizer", "rows", "heads", "hidden_size", "dtype"]


@pytest.mark.slow
def test_joint_training_goes_through_the_layers_too(recipe: Path, tmp_path: Path) -> None:
    lora = {"lora.rank": 4, "lora.heads_only": 0.0, "lora.base_loss": "kl", "optim.loss": "kl", "optim.mix_steps": 1}
    assert run(recipe, tmp_path, **lora) == 0
    *steps, last = metrics(tmp_path)
    assert all(line["base_loss"] >= 0 for line in steps)
    assert last["heldout_tokens_per_step"] >= 1.0
    model = MedusaModel.from_pretrained(tmp_path / "heads", dtype=torch.float32, device="cpu")
    assert model.base.adapter
    assert (
        model.generate([5, 6, 7], max_new_tokens=9).tokens
        == model.generate([5, 6, 7], max_new_tokens=9, nodes=1).tokens
    )
