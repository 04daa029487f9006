"""Checkpoints that would give other weights than the model's, or run code, are refused."""

import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa import BaseModel
from tests.medusa.test_conformance import RECURRENT, tiny

PROJECTION = "model.layers.0.mlp.up_proj.weight"


def _without(name, weights):
    del weights[name]


def _as_gptq(weights):
    packed = torch.zeros(4, len(weights.pop(PROJECTION)), dtype=torch.int32)
    weights[PROJECTION.replace(".weight", ".qweight")] = packed


def _narrower(weights):
    weights[PROJECTION] = weights[PROJECTION][:60].clone()


def _in_8_bits(weights):
    weights[PROJECTION] = weights[PROJECTION].to(torch.float8_e4m3fn)
    weights[PROJECTION + "_scale"] = torch.ones(())


class Foreign:
    def __reduce__(self):
        return print, ("this code ran",)


@pytest.fixture
def copy(base_directory, tmp_path):
    return Path(shutil.copytree(base_directory, tmp_path / "base"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (partial(_without, "lm_head.weight"), r"its files lack 1 of the model's tensors, among them lm_head\.weight"),
        (partial(_without, PROJECTION), rf"lack 1 of the model's tensors, among them {PROJECTION}"),
        (_as_gptq, rf"lack 1 of the model's tensors, among them {PROJECTION}"),
        (_narrower, rf"1 of its tensors .* shapes of its config\.json: {PROJECTION} is \[60, 32\], and .*"),
        (_in_8_bits, rf"quantised in a way that is not read here \({PROJECTION}_scale is left over\)"),
    ],
    ids=["no output layer", "no projection", "GPTQ without its config", "another shape", "scales that nobody reads"],
)
def test_weights_that_the_files_do_not_say_are_not_made_up(copy, change, said):
    file = copy / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"base \({copy}\) cannot be loaded: .*{said}; give another path"):
        BaseModel.load(copy, torch.float32)


def test_a_pickle_of_more_than_tensors_is_not_read(copy, capsys):
    file = copy / "model.safetensors"
    torch.save(load_file(file), copy / "pytorch_model.bin")
    file.unlink()
    assert BaseModel.load(copy, torch.float32).num_layers
    torch.save({"a": Foreign()}, copy / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match="a pickle of more than tensors; download it again, or give its weights as safetensors"
    ):
        BaseModel.load(copy, torch.float32)
    assert "this code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("family", RECURRENT)
def test_no_advice_to_install_what_a_cpu_cannot_use(family, base_directory, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    log = logging.getLogger("transformers.integrations.hub_kernels")
    type(log).warning_once.cache_clear()
    BaseModel.load(base_directory, device="cpu")
    with caplog.at_level(logging.WARNING, "transformers"), torch.inference_mode():
        tiny(family)[1](torch.tensor([[5, 6, 7]]), use_cache=False)
        assert "falling back" not in caplog.text
        log.warning("`something_else` is falling back")
    assert "falling back" in caplog.text
