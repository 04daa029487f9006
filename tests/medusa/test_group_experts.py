"""Experts in groups of 4 or 8 bits (GPTQ, AWQ, compressed-tensors), which checkpoints store one by one."""

import functools
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from medusa import BaseModel
from medusa.base import groupwise
from medusa.base.group_layouts import LAYOUTS
from medusa.cpu.experts import PackedExperts, use_experts
from medusa.cpu.native import available
from medusa.cpu.packed import Packed
from tests.medusa.grouped import CASES, defined, layer
from tests.medusa.packed_sums import same
from tests.medusa.test_conformance import config_of

HIDDEN, INNER, EXPERTS = 128, 256, 3
SHAPE = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": 2,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "shared_expert_intermediate_size": INNER,
    "head_dim": 32, "initializer_range": 0.1,
}  # fmt: skip
STORED = {"mixtral": ("w1", "w3", "w2")}
"""Names of gate, up and down projection where they are not transformers'."""
PACKED = pytest.mark.skipif(not available(), reason="no C++ kernels on this machine")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Directories by family and case, and the weights of the experts that each holds, by the model's names."""

    @functools.cache
    def make(family, case):
        torch.manual_seed(0)
        config, directory = config_of(family, **SHAPE), tmp_path_factory.mktemp("experts")
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
        state, whole = load_file(directory / "model.safetensors"), {}
        gate, up, down = STORED.get(family, ("gate_proj", "up_proj", "down_proj"))
        block = "block_sparse_moe" if family == "mixtral" else "mlp"
        for index in range(2):
            for name, owns in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
                weights = []
                for expert in range(EXPERTS):
                    for own in owns:
                        path = f"model.layers.{index}.{block}.experts.{expert}.{own}"
                        shape = state.pop(f"{path}.weight").shape
                        tensors = layer(case, *shape)
                        weights.append(defined(case, tensors, *shape))
                        state |= {f"{path}.{part}": one for part, one in tensors.items()}
                found = torch.stack(weights).view(EXPERTS, -1, weights[0].shape[1])
                whole[f"model.layers.{index}.mlp.experts.{name}"] = found
        save_file({key: one.contiguous() for key, one in state.items()}, directory / "model.safetensors")
        config.dtype, config.quantization_config = torch.bfloat16, CASES[case]
        config.save_pretrained(directory)
        return directory, whole

    return make


def read(directory, dtype, pack):
    return groupwise.load(str(directory), AutoConfig.from_pretrained(directory), dtype, pack)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("case", ["gptq", "w8a16"])
@torch.inference_mode()
def test_weights_are_those_that_the_format_defines(family, case, checkpoint, caplog):
    directory, defines = checkpoint(family, case)
    plain = read(directory, torch.float32, pack=False)
    for name, weight in defines.items():
        assert torch.equal(plain.get_parameter(name), weight), name
    if not available():
        return
    with caplog.at_level(logging.INFO, "medusa"):
        packed = read(directory, torch.bfloat16, pack=True)
    assert "4 layers kept packed, 0 expanded" in caplog.text
    for index, part in enumerate(packed.model.layers):
        experts = part.mlp.experts
        assert isinstance(experts, PackedExperts)
        for own, kept in (("gate_up", experts.gate_up), ("down", experts.down)):
            weight = defines[f"model.layers.{index}.mlp.experts.{own}_proj"]
            assert torch.equal(kept.expand(), weight.bfloat16().flatten(0, 1))
    expanded = read(directory, torch.bfloat16, pack=False)
    use_experts(expanded)
    tokens = torch.randint(3, 50, (2, 30))
    assert same(*(model(tokens).logits for model in (packed, expanded)))


@PACKED
def test_what_the_kernels_do_not_know_is_expanded(checkpoint, caplog):
    directory, defines = checkpoint("qwen3_moe", "gptq in another order")
    with caplog.at_level(logging.INFO, "medusa"):
        model = read(directory, torch.bfloat16, pack=True)
    assert "0 layers kept packed, 4 expanded" in caplog.text
    assert all(torch.equal(model.get_parameter(name), weight.bfloat16()) for name, weight in defines.items())


def copied(directory, to, change):
    """The same checkpoint with its tensors changed by name: None = left out."""
    state = {change(key): one for key, one in load_file(directory / "model.safetensors").items()}
    state.pop(None, None)
    save_file(state, to / "model.safetensors")
    (to / "config.json").write_bytes((directory / "config.json").read_bytes())
    return to


@pytest.mark.parametrize(
    "change",
    [
        lambda key: None if "layers.0.mlp.experts.1.up_proj" in key else key,
        lambda key: key.replace("layers.0.mlp.experts.2.up_proj", "layers.0.mlp.experts.7.up_proj"),
    ],
    ids=["one is missing", "one has another number"],
)
def test_experts_that_are_missing_are_one_error(change, checkpoint, tmp_path):
    copied(checkpoint("qwen3_moe", "gptq")[0], tmp_path, change)
    reason = (
        rf"experts \(model.layers.0.mlp.experts\) have \d quantised layers and need {2 * EXPERTS}, of experts 0 to 2;"
    )
    with pytest.raises(ValueError, match=reason):
        BaseModel.load(tmp_path, device="cpu", pack=True)


@pytest.mark.parametrize("plain", ["experts", "down_proj", "layers.1"])
def test_some_experts_may_be_plain(plain, checkpoint, tmp_path):
    """As checkpoints with modules_to_not_convert are."""
    directory, defines = checkpoint("qwen3_moe", "gptq")
    state, whole = load_file(directory / "model.safetensors"), read(directory, torch.float32, pack=False).state_dict()
    for name in defines:
        if plain in name:
            path, _, own = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else ("down_proj",)
            for expert in range(EXPERTS):
                for part, weight in zip(parts, whole[name][expert].chunk(len(parts)), strict=True):
                    for stored in LAYOUTS["gptq"].parts:
                        del state[f"{path}.{expert}.{part}.{stored}"]
                    state[f"{path}.{expert}.{part}.weight"] = weight.clone()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    found = read(tmp_path, torch.float32, pack=False).state_dict()
    assert found.keys() == whole.keys()
    assert all(torch.equal(one, whole[name]) for name, one in found.items())
    if available():
        packed = read(tmp_path, torch.bfloat16, pack=True)
        wanted = [0, 0] if plain == "experts" else [2, 0] if plain == "layers.1" else [1, 1]
        kept = [
            [isinstance(getattr(layer.mlp.experts, own, None), Packed) for own in ("gate_up", "down")]
            for layer in packed.model.layers
        ]
        assert list(map(sum, kept)) == wanted
