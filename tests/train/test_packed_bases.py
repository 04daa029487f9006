"""Training on bases that do not keep packed documents apart by themselves."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from medusa.base.model import BaseModel
from medusa.data.packing import pack
from medusa.data.sources import read_samples
from medusa.loading.self_test import UnsupportedBaseError, choose_decoding
from medusa.loading.separation import choose_separation
from medusa.train import trainer
from medusa.train.features import BasePass
from medusa.train.hidden_cache import HiddenCache
from medusa.train.recipe_file import read_recipe
from medusa.train.run_directory import RunDirectory
from medusa.train.sharded_base import load_sharded
from medusa.train.stop import StopRequest
from medusa.train.trainer import Trainer
from medusa.train.workers import Workers
from tests.train.jobs import finish, metrics, run, train, write_recipe

SHAPES = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "llama4_text": {
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "intermediate_size_mlp": 48,
        "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 5, "floor_scale": 4,
        "attn_scale": 0.5, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
    },
}  # fmt: skip
WAYS = {"opt": "masks", "llama4_text": "rows"}
SAID = {"opt": "needs masks that are passed with each call", "llama4_text": "needs a row for each document"}


@pytest.fixture(scope="module", params=SHAPES)
def leaky(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast):
    """A small random base of such a family: its name and where it is."""
    torch.manual_seed(0)
    family = request.param
    config = AutoConfig.for_model(
        family, vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3,
        max_position_embeddings=256, eos_token_id=0, bos_token_id=None, pad_token_id=0, **SHAPES[family],
    )  # fmt: skip
    directory = tmp_path_factory.mktemp(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return family, directory


@pytest.mark.parametrize("joint", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["heads", "joint"])
def test_a_run_measures_its_base(leaky, samples: Path, tmp_path: Path, joint: bool, caplog) -> None:
    family, directory = leaky
    sections = {"optim": {"steps": 3}, "lora": {"rank": 2 * joint, "heads_only": 0.0}}
    sections["cache"] = {"mode": "online" if joint else "offline"}
    recipe = write_recipe(tmp_path / "recipe.yaml", directory, samples, sections)
    with caplog.at_level(logging.WARNING):
        made = Trainer(
            read_recipe(recipe, {"run": str(tmp_path)}), RunDirectory(tmp_path), Workers.start("cpu", StopRequest())
        )
    assert made.base.traits.separation == WAYS[family]
    assert SAID[family] in caplog.text
    losses = [made.train_step()["loss"] for _ in range(3)]
    assert losses[2] < losses[0]


def test_hidden_states_on_disk_of_documents_that_leaked_are_refused(leaky, samples, tmp_path):
    _, directory = leaky
    base = BaseModel.load(directory, dtype=torch.float32, device="cpu")
    packed = pack(read_samples(samples, base.tokenizer), 96)
    HiddenCache(tmp_path, base, packed, 2, BasePass(base, packed, 2, 2), 10_000)  # as if nothing had been measured
    measured = choose_separation(base, packed.input_ids[0].long(), lambda here: here)
    with pytest.raises(ValueError, match="documents is separate, the states have None"):
        HiddenCache(tmp_path, measured, packed, 2, BasePass(measured, packed, 2, 2), 10_000)


def test_a_sharded_base_is_measured_too(leaky, samples: Path) -> None:
    family, directory = leaky
    workers = Workers.start("cpu", StopRequest())
    base = choose_decoding(load_sharded(str(directory), torch.float32, workers.device))
    packed = pack(read_samples(samples, base.tokenizer)[:6], 192)
    base = choose_separation(base, packed.input_ids[0].long(), workers.any)
    assert base.traits.separation == WAYS[family]
    ids, positions = packed.input_ids.long(), packed.position_ids.long()
    with torch.no_grad():
        found = base.hidden_states(ids, positions)
        for row in range(len(packed)):
            starts = (positions[row] == 0).nonzero().flatten()
            assert len(starts) > 2
            alone = [base.hidden_states(part[None])[0] for part in ids[row].tensor_split(starts[1:])]
            torch.testing.assert_close(found[row], torch.cat(alone), rtol=0, atol=1e-4)


def test_a_base_that_verifies_nothing_is_not_trained_on(base: Path, samples: Path, tmp_path: Path, caplog, monkeypatch):
    def refuse(_: BaseModel) -> BaseModel:
        raise UnsupportedBaseError("base cannot be decoded here")

    monkeypatch.setattr(trainer, "choose_decoding", refuse)
    recipe = write_recipe(tmp_path / "recipe.yaml", base, samples, {})  # no held-out samples
    assert run(recipe, tmp_path / "run") == 1
    assert "cannot be decoded here" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("leaky", ["llama4_text"], indirect=True)  # its passes depend on the documents of a process
def test_processes_of_a_sharded_base_stay_in_step(leaky, samples: Path, tmp_path: Path) -> None:
    _, directory = leaky
    sections = {"optim": {"steps": 4, "rows_per_step": 5, "micro_rows": 1}, "base": {"shard": True}}
    recipe = write_recipe(tmp_path / "recipe.yaml", directory, samples, sections)
    finish(train(recipe, tmp_path / "two"))
    assert run(recipe, tmp_path / "one", **{"base.shard": False}) == 0
    losses = [[line.get("loss") for line in metrics(tmp_path / name)[:4]] for name in ("two", "one")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
