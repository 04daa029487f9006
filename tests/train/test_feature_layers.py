"""Training heads that read the layer below the last one too: the whole job on a tiny base."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa import BaseModel, MedusaModel
from medusa.data.packing import pack
from medusa.data.sources import read_samples
from medusa.train.blocks import Block
from medusa.train.config import OptimRecipe
from medusa.train.features import BasePass
from medusa.train.hidden_cache import identity
from tests.train.jobs import Acting, assert_same_run, metrics, run

pytestmark = pytest.mark.usefixtures("no_pictures")

LAYERS = (1,)
VALUES = {"heads.feature_layers": 1, "heads.architecture": "recurrent", "optim.mix_steps": 3}


@pytest.fixture(scope="module")
def finished(recipe: Path, no_pictures: None) -> Path:
    assert run(recipe, recipe.parent / "layers", **VALUES) == 0
    return recipe.parent / "layers"


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
    finished: Path, recipe: Path, tmp_path: Path, interrupted_at: Acting
) -> None:
    cache = VALUES | {"cache.mode": "hybrid", "cache.directory": tmp_path / "hidden"}
    with interrupted_at(5):
        assert run(recipe, tmp_path / "run", **cache) == 130
    assert run(recipe, tmp_path / "run", **cache) == 0
    shard = load_file(next((tmp_path / "hidden").glob("*.safetensors")))
    assert shard["hidden"].shape[1] == 2 * 32
    assert_same_run(tmp_path / "run", finished, tolerance=1e-5)


@pytest.mark.parametrize("loss", ["kl", pytest.param("tv", marks=pytest.mark.slow)])
def test_soft_targets_are_those_of_the_last_hidden_state(base: Path, samples: Path, loss: str) -> None:
    untapped = BaseModel.load(base, dtype=torch.float32, device="cpu")
    packed, optim = pack(read_samples(samples, untapped.tokenizer), 96), OptimRecipe(rows_per_step=4, loss=loss)

    def teachers(base: BaseModel) -> torch.Tensor:
        states = BasePass(base, packed, num_heads=2, micro_rows=2)
        block = Block(optim, packed, 2, first=0, steps=1, rank=0, world_size=1, hidden_size=base.hidden_size)
        found = [batch.teacher for batch, _ in block.micro_batches(0, states, size=40)]
        return torch.cat([teacher for teacher in found if teacher is not None])

    ours = teachers(untapped.tapped(LAYERS))
    assert ours.shape[1] == 32
    assert torch.equal(ours, teachers(untapped))


def test_states_without_layers_are_named_as_before_there_were_any(base: Path, samples: Path) -> None:
    model = BaseModel.load(base, dtype=torch.float32, device="cpu")
    known = identity(model, pack(read_samples(samples, model.tokenizer), 96), 2)
    assert list(known) == ["format", "base", "config", "tokenizer", "rows", "heads", "hidden_size", "dtype"]


@pytest.mark.slow
def test_joint_training_goes_through_the_layers_too(recipe: Path, tmp_path: Path) -> None:
    joint = {"lora.rank": 4, "lora.heads_only": 0.0, "lora.base_loss": "kl", "optim.loss": "kl", "optim.mix_steps": 1}
    assert run(recipe, tmp_path, **VALUES | joint) == 0
    *steps, last = metrics(tmp_path)
    assert all(line["base_loss"] >= 0 for line in steps)
    assert last["heldout_tokens_per_step"] >= 1.0
    model = MedusaModel.from_pretrained(tmp_path / "heads", dtype=torch.float32, device="cpu")
    assert model.base.adapter
    assert (
        model.generate([5, 6, 7], max_new_tokens=9).tokens
        == model.generate([5, 6, 7], max_new_tokens=9, nodes=1).tokens
    )


def test_documents_through_the_pass_of_decoding_have_the_states_of_packed_rows(base: Path, samples: Path) -> None:
    plain = BaseModel.load(base, dtype=torch.float32, device="cpu").tapped((1,))
    fused = plain.with_fused_pass()
    packed = pack(read_samples(samples, plain.tokenizer), row_tokens=96)
    rows = torch.tensor([3, 0, len(packed) - 1])
    for whole in (False, True):
        expected, states = (BasePass(each, packed, 3, 2, whole).read(rows) for each in (plain, fused))
        assert expected.shape[1] == 2 * plain.hidden_size
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
