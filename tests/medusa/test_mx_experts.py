"""Checkpoints of GPT-OSS, whose experts are of MXFP4, as bases on a CPU."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from medusa import BaseModel
from medusa.base import groupwise
from medusa.base.mx_experts import BITS
from medusa.cpu.experts import use_experts
from medusa.cpu.int8 import round_linears
from medusa.cpu.native import available, has_tiles, packing_pays
from medusa.sampling import SamplingParams, Speculation
from medusa.serve.server import main
from tests.medusa.packed_sums import same, with_heads
from tests.medusa.test_conformance import config_of

HIDDEN, INNER, EXPERTS = 64, 96, 4
NAMES = [f"model.layers.{layer}.mlp.experts.{own}_proj" for layer in range(3) for own in ("gate_up", "down")]
PACKED = pytest.mark.skipif(not available(), reason="no C++ kernels on this machine")


@pytest.fixture(scope="module")
def directory(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("mxfp4")
    config = config_of("gpt_oss", vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=INNER, head_dim=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = model.state_dict()
    for name in NAMES:
        experts, inputs, outputs = state.pop(name).shape
        shape = experts, outputs, inputs // 32
        state[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
        state[f"{name}_bias"].normal_(0, 0.1)
    state[f"{NAMES[0]}_scales"][0, 0, 0], state[f"{NAMES[0]}_blocks"][0, 0, 0] = 0, 0x80  # zeros of both signs
    config.dtype, config.quantization_config = torch.bfloat16, {"quant_method": "mxfp4"}
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


def read(directory, pack, dtype=torch.bfloat16):
    return groupwise.load(str(directory), AutoConfig.from_pretrained(directory), dtype, pack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_weights_are_those_of_transformers(directory, dtype):
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()
    ours = read(directory, False, dtype).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert ours[NAMES[0]].std() > 0.1


@PACKED
@torch.inference_mode()
def test_packed_experts_compute_what_expanded_ones_do(directory, caplog):
    with caplog.at_level(logging.INFO, "medusa"):
        packed = read(directory, True)
    assert "(mxfp4), 6 layers kept packed, 0 expanded" in caplog.text
    expanded = read(directory, False)
    assert use_experts(expanded) == 3
    for ours, theirs in zip(packed.model.layers, expanded.model.layers, strict=True):
        ours, theirs = ours.mlp.experts, theirs.mlp.experts
        assert torch.equal(ours.gate_up.expand(), theirs.gate_up)
        assert torch.equal(ours.down.expand(), theirs.down)
    size = packed.model.layers[0].mlp.experts.gate_up.parts.nbytes
    assert size * 8 == BITS * EXPERTS * 2 * INNER * HIDDEN
    tokens = torch.randint(3, 50, (2, 40))
    assert same(*(model(tokens).logits for model in (packed, expanded)))


@PACKED
@pytest.mark.parametrize("int8", [False, True])
def test_texts_are_those_of_the_base(directory, int8):
    models, tokenizer = [], AutoTokenizer.from_pretrained(directory)
    for pack in (True, False):
        model = read(directory, pack)
        if int8:
            round_linears(model, output=model.get_output_embeddings())
        models.append(with_heads(model, tokenizer))
    assert [model.base.fused for model in models] == [True, True]
    for temperature, nodes in ((0.0, 6), (0.9, 6)):
        sampling = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
        for prompt in ([5, 9, 5, 9, 5], list(range(3, 40))):
            speculations = (Speculation("heads", nodes=nodes), Speculation(nodes=1))
            drafted, plain = (models[0].generate(prompt, sampling=sampling, speculation=one) for one in speculations)
            assert drafted.tokens == plain.tokens
            other = models[1].generate(prompt, sampling=sampling, speculation=speculations[1])
            assert other.tokens == plain.tokens or int8 or not has_tiles()


def test_it_is_a_base_by_its_path(directory, capsys):
    base = BaseModel.load(directory, device="cpu", pack=True)
    assert base.packed == packing_pays()
    assert base.source == "weights of experts of 4 bits with a scale for each 32 (mxfp4)"
    assert not BaseModel.load(directory, device="cpu", pack=True, dtype=torch.float32).packed
    assert main(["--dry-run", "--base", str(directory)]) == 0
    # About half of the weights of so small a model are those of experts.
    assert f"{7 if packing_pays() else 16} bits a weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            {f"{NAMES[1]}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)},
            r"down_proj\) are stored as .*\[4, 96, 64\]",
        ),
        ({f"{NAMES[1]}_scales": torch.zeros(4, 64, 3)}, r"down_proj\) are stored as torch.uint8 and torch.float32"),
        ({"model.layers.0.up_blocks": torch.zeros(1), "model.layers.0.up_scales": torch.zeros(1)}, "not in the model"),
        ({f"{NAMES[1]}_scales": None}, r"tensor \(.*down_proj"),
    ],
)
def test_other_tensors_than_the_model_has_are_one_error(directory, damage, reason, tmp_path):
    state = {
        name: one for name, one in (load_file(directory / "model.safetensors") | damage).items() if one is not None
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ValueError, match=reason):
        BaseModel.load(tmp_path, device="cpu", pack=True)


def test_scales_may_be_of_their_own_dtype(directory, tmp_path):
    state = load_file(directory / "model.safetensors")
    state = {name: one.view(torch.float8_e8m0fnu) if name.endswith("_scales") else one for name, one in state.items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    found, wanted = (read(one, False).state_dict() for one in (tmp_path, directory))
    assert all(torch.equal(one, wanted[name]) for name, one in found.items())


@PACKED
@pytest.mark.parametrize("exponent", [1, 255])
def test_numbers_that_no_packing_holds_are_expanded(directory, exponent, tmp_path):
    state = load_file(directory / "model.safetensors")
    state[f"{NAMES[0]}_scales"][1, 2, 1] = exponent
    state[f"{NAMES[0]}_blocks"][1, 2, 1] = 0x11
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    experts = read(tmp_path, True).model.layers[0].mlp.experts
    assert isinstance(experts.gate_up, torch.Tensor)
    assert not isinstance(experts.down, torch.Tensor)
