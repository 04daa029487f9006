"""Checkpoints of GPTQ, AWQ and compressed-tensors as bases on a CPU: every weight is what the format defines."""

import copy
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from medusa import BaseModel, MedusaModel
from medusa.base import groupwise
from medusa.base.group_layouts import LAYOUTS, Grouped, Layout, read_layer
from medusa.cpu.native import available, has_tiles, packing_pays
from medusa.cpu.packed import Packed, PackedLinear
from medusa.loading.self_test import choose_decoding
from medusa.sampling import SamplingParams, Speculation
from medusa.serve.model_options import describe
from medusa.serve.server import main
from tests.medusa.grouped import CASES, EXPANDED, defined, layer, scales, scheme, words
from tests.medusa.packed_sums import check_sums, same, with_heads

HIDDEN, INNER = 256, 512
LAYERS = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        eos_token_id=0, bos_token_id=None, initializer_range=0.1, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, bias in model.named_parameters():
        if name.endswith(".bias"):
            bias.data.normal_(0, 0.1)
    return model


@pytest.fixture(scope="module")
def checkpoint(model, tokenizer, tmp_path_factory):
    """Directories by case, and the weights that each holds."""
    made = {}

    def make(case):
        if case not in made:
            torch.manual_seed(1)
            half = torch.bfloat16 if case.startswith("w") else torch.float16
            state, defines = {key: one.to(half) for key, one in model.state_dict().items()}, {}
            for index in range(2):
                for part, names in LAYERS.items():
                    for name in names:
                        path = f"model.layers.{index}.{part}.{name}"
                        weight = state.pop(f"{path}.weight")
                        tensors = layer(case, *weight.shape)
                        defines[path] = defined(case, tensors, *weight.shape)
                        state |= {f"{path}.{own}": one for own, one in tensors.items()}
            directory = tmp_path_factory.mktemp("grouped")
            config = copy.deepcopy(model.config)
            config.dtype, config.quantization_config = half, CASES[case]
            config.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            save_file({key: one.contiguous() for key, one in state.items()}, directory / "model.safetensors")
            made[case] = directory, defines
        return made[case]

    return make


def read(directory, dtype, pack):
    config = LlamaConfig.from_pretrained(directory)
    return groupwise.load(str(directory), config, dtype, pack)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_those_that_the_format_defines(case, dtype, checkpoint, model):
    directory, defines = checkpoint(case)
    plain = read(directory, dtype, pack=False)
    for path, weight in defines.items():
        layer = plain.get_submodule(path)
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight, weight.to(dtype)), path
    norm = model.model.norm.weight.to(plain.lm_head.weight.dtype)
    assert torch.equal(plain.model.norm.weight, norm)
    assert {one.dtype for one in plain.state_dict().values()} == {dtype}


@pytest.mark.skipif(not available(), reason="no C++ kernels on this machine")
@pytest.mark.parametrize("case", CASES)
def test_layers_stay_packed_where_the_kernels_know_their_groups(case, checkpoint, caplog):
    directory, defines = checkpoint(case)
    with caplog.at_level(logging.INFO, "medusa"):
        packed = read(directory, torch.bfloat16, pack=True)
    layers = {path: packed.get_submodule(path) for path in defines}
    assert {type(one) for one in layers.values()} == {nn.Linear if case in EXPANDED else PackedLinear}
    assert all(torch.equal(layers[path].weight, weight.bfloat16()) for path, weight in defines.items())
    counts = "0 layers kept packed, 14 expanded" if case in EXPANDED else "14 layers kept packed, 0 expanded"
    assert counts in caplog.text


@pytest.fixture(scope="module", params=["gptq", "awq", "w8a16"])
def pair(request, checkpoint):
    """The base with its weights packed, and the same expanded, with the same heads."""
    if not available():
        pytest.skip("no C++ kernels on this machine")
    directory, _ = checkpoint(request.param)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [with_heads(read(directory, torch.bfloat16, pack), tokenizer) for pack in (True, False)]


def test_logits_are_those_of_the_expanded_base(pair):
    packed, expanded = (model.base for model in pair)
    assert (packed.packed, expanded.packed, packed.fused, expanded.fused) == (True, False, True, True)
    assert packed.weight_bytes < 0.75 * expanded.weight_bytes
    tokens = torch.randint(0, packed.vocab_size, (2, 40))
    logits = [base.model(tokens).logits for base in (packed, expanded)]
    assert same(*logits)
    assert logits[0].std() > 0.1


def test_texts_are_those_of_the_base(pair):
    for temperature, nodes in ((0.0, 1), (0.9, 6)):
        sampling = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
        how = {"sampling": sampling, "speculation": Speculation("heads", nodes=nodes)}
        for prompt in ([5, 9, 5, 9, 5], list(range(3, 60)), [7]):
            texts = [model.generate(prompt, **how).tokens for model in pair]
            assert texts[0] == pair[0].generate(prompt, sampling=sampling, speculation=Speculation(nodes=1)).tokens
            assert texts[0] == texts[1] or not has_tiles()


@pytest.mark.skipif(not available(), reason="no C++ kernels on this machine")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ["symmetric", "any zero point"])
def test_packed_numbers_are_exact(bits, dtype, rule):
    """All numbers with all zero points (of 8 bits, those that fit) and many scales, and sums of them."""
    torch.manual_seed(0)
    most = 1 << bits
    outputs, inputs, size = 16 * 37, max(most, 32) * 6, max(most, 32)
    numbers = (torch.arange(size) % most).to(torch.uint8).repeat(outputs, inputs // size)
    stored = (torch.rand(outputs, 6) * 2.0 ** torch.randint(-12, 4, (outputs, 6))).to(dtype)
    zeros = torch.full((outputs, 6), most // 2, dtype=torch.uint8)
    if rule != "symmetric":
        if bits == 8:
            numbers = numbers // 2 + 64
            zeros = torch.randint(64, 192, zeros.shape, dtype=torch.uint8)
        else:
            zeros = (torch.arange(outputs * 6) % 16).to(torch.uint8).view(outputs, 6)
    whole = Grouped(bits, numbers, stored, zeros)
    packed = Packed.of_groups(numbers, stored, zeros, bits)
    assert torch.equal(packed.expand(), whole.expand(torch.bfloat16))
    assert torch.equal(PackedLinear(packed)(torch.eye(inputs, dtype=torch.bfloat16)).T, whole.expand(torch.bfloat16))
    check_sums(packed, whole.expand(torch.float32))


def test_what_no_packing_holds_exactly_is_not_packed():
    numbers, zeros = torch.zeros(16, 96, dtype=torch.uint8), torch.full((16, 1), 8, dtype=torch.uint8)
    fine = torch.full((16, 1), 0.1)  # float32
    assert Packed.of_groups(numbers, fine, zeros, 4) is None
    assert Packed.of_groups(numbers + 255, fine, zeros, 8) is None
    assert Packed.of_groups(numbers[:, :48], fine.half(), zeros, 4) is None
    assert Packed.of_groups(numbers, fine.half(), zeros, 4) is not None
    assert Packed.of_groups(numbers, fine, zeros + 120, 8) is not None


def test_zero_points_of_gptq_borrow_from_the_whole_word(checkpoint, tmp_path):
    """Of version 1, one less is stored: a zero point of 0 borrows, as its writers subtract."""
    directory, _ = checkpoint("gptq")
    tensors = load_file(directory / "model.safetensors")
    path = "model.layers.0.mlp.up_proj"
    own = {name: tensors[f"{path}.{name}"] for name in LAYOUTS["gptq"].parts}
    second = own | {"qzeros": words(*own["qzeros"].shape)}
    first = own | {"qzeros": second["qzeros"] - 0x11111111}
    old = LAYOUTS["gptq"].read(first, INNER, HIDDEN, {"checkpoint_format": "gptq"})
    new = LAYOUTS["gptq"].read(second, INNER, HIDDEN, {"checkpoint_format": "gptq_v2"})
    assert torch.equal(old.zeros, new.zeros)
    assert {int(old.zeros.min()), int(old.zeros.max())} == {0, 15}


def test_it_is_a_base_by_its_path(checkpoint, caplog):
    directory, _ = checkpoint("awq")
    with caplog.at_level(logging.INFO, "medusa"):
        base = BaseModel.load(directory, device="cpu", pack=True)
    packed = packing_pays()
    assert base.packed == packed
    assert base.dtype == (torch.bfloat16 if packed else base.dtype)
    assert base.source == "weights of 4 bits in groups of 64 (awq)"
    assert f"{base.source}, {14 * packed} layers kept packed, {14 * (not packed)} expanded" in caplog.text
    assert base.source in describe(MedusaModel(choose_decoding(base), None), None)


def test_other_uses_have_plain_layers(checkpoint):
    directory, defines = checkpoint("gptq")
    for how in ({"pack": False}, {"pack": True, "dtype": torch.float32}, {"pack": True, "dtype": torch.float16}):
        base = BaseModel.load(directory, device="cpu", **how)
        assert not base.packed
        weights = {path: base.model.get_submodule(path).weight for path in defines}
        assert all(torch.equal(weights[path], weight.to(base.dtype)) for path, weight in defines.items())


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_an_adapter_is_merged_with_expanded_layers(case, checkpoint, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory, _ = checkpoint(case)
    below = read(directory, torch.float16, False)
    tuned = peft.get_peft_model(below, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    tuned.peft_config["default"].base_model_name_or_path = str(directory)
    tuned.save_pretrained(tmp_path / "tuned")
    base = BaseModel.load(tmp_path / "tuned", device="cpu", dtype=torch.float16)
    expected = tuned.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in base.model.state_dict().items())
    assert not hasattr(base.model.config, "quantization_config")


def test_files_may_be_several(checkpoint, tmp_path, monkeypatch):
    directory, defines = checkpoint("w4a16, asymmetric")
    tensors, index = load_file(directory / "model.safetensors"), {}
    for part in (0, 1):
        names = sorted(tensors)[part::2]
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in names}, tmp_path / file)
        index |= dict.fromkeys(names, file)
    (tmp_path / groupwise.INDEX).write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    monkeypatch.setattr(groupwise, "snapshot_download", lambda name, allow_patterns: str(tmp_path))
    config = LlamaConfig.from_pretrained(tmp_path)
    model = groupwise.load("someone/model-of-the-hub", config, torch.bfloat16, pack=False)
    assert all(torch.equal(model.get_submodule(path).weight, one.bfloat16()) for path, one in defines.items())


def test_old_writers_of_gptq_give_each_layer_a_bias_and_name_files_otherwise(checkpoint, tmp_path):
    directory, defines = checkpoint("gptq")
    tensors = load_file(directory / "model.safetensors")
    without = {path: weight for path, weight in defines.items() if f"{path}.bias" not in tensors}
    tensors |= {f"{path}.bias": torch.zeros(len(weight), dtype=torch.float16) for path, weight in without.items()}
    save_file(tensors, tmp_path / "gptq_model-4bit-128g.safetensors")
    config = LlamaConfig.from_pretrained(directory)
    model = groupwise.load(str(tmp_path), config, torch.bfloat16, pack=available())
    assert all(model.get_submodule(path).bias is None for path in without)
    assert not {"gate_proj", "up_proj", "down_proj"} - {path.split(".")[-1] for path in without}


@pytest.mark.parametrize("pack", sorted({False, available()}))
def test_the_output_layer_may_be_tied_or_quantised(pack, checkpoint, tmp_path):
    directory, _ = checkpoint("w4a16")
    tensors, config = load_file(directory / "model.safetensors"), LlamaConfig.from_pretrained(directory)
    vocabulary = len(tensors.pop("lm_head.weight"))
    save_file(tensors, tmp_path / "model.safetensors")
    config.tie_word_embeddings = True
    model = groupwise.load(str(tmp_path), config, torch.bfloat16, pack)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    own = layer("w4a16", vocabulary, HIDDEN)
    save_file(tensors | {f"lm_head.{name}": one for name, one in own.items()}, tmp_path / "model.safetensors")
    for config.tie_word_embeddings in (False, True):
        model = groupwise.load(str(tmp_path), config, torch.bfloat16, pack)
        kept = pack and not config.tie_word_embeddings
        assert type(model.lm_head) is (PackedLinear if kept else nn.Linear)
        assert torch.equal(model.lm_head.weight, defined("w4a16", own, vocabulary, HIDDEN).bfloat16())


@pytest.mark.parametrize(
    ("told", "odd"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq: 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "gptq: 2 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq: marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq: marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq: gemv"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "awq: llm-awq"),
        ({"quant_method": "compressed-tensors"} | scheme(8) | {"format": "int-quantized"}, "int-quantized"),
        ({"quant_method": "compressed-tensors"} | scheme(8) | {"format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "compressed-tensors"} | scheme() | {"format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors"} | scheme(input_activations={"num_bits": 8}), "rounded activations"),
        ({"quant_method": "compressed-tensors"} | scheme(3), "int of 3 bits"),
        ({"quant_method": "compressed-tensors"} | scheme() | {"kv_cache_scheme": {"num_bits": 8}}, "KV cache"),
    ],
)
def test_other_ways_of_quantising_are_one_error(told, odd, checkpoint, tmp_path):
    config = LlamaConfig.from_pretrained(checkpoint("gptq")[0])
    config.quantization_config = told
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"quantisation \(.*{odd}.*\) cannot be read on a CPU.* a GGUF file or plain"):
        BaseModel.load(tmp_path, device="cpu", pack=True)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"model.layers.0.mlp.up_proj.scales": None}, r"up_proj\) cannot be read: tensor 'scales' is missing"),
        ({"model.layers.0.mlp.up_proj.qweight": words(24, INNER)}, r"up_proj\) cannot be read: it has 3 bits a number"),
        ({"model.layers.0.mlp.up_proj.scales": scales(3, INNER)}, r"3 groups of \[512, 256\] do not make"),
        ({"model.norm.weight": None}, r"tensor \(model.norm.weight\) is missing"),
        ({"model.act.scales": scales(3)}, r"tensor \(model.act.scales\) is not in the model"),
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(INNER)}, r"up_proj.bias\) is not in the model"),
        ({"model.layers.0.mlp.experts.qweight": words(8, 8)}, r"experts\) is not in the model"),
        ({"model.norm.qweight": words(8, 8)}, r"norm\) is no linear layer there but LlamaRMSNorm"),
    ],
)
def test_other_tensors_than_the_model_has_are_one_error(damage, reason, checkpoint, tmp_path):
    directory, _ = checkpoint("gptq")
    tensors = load_file(directory / "model.safetensors") | damage
    save_file({key: one for key, one in tensors.items() if one is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ValueError, match=reason):
        BaseModel.load(tmp_path, device="cpu", pack=True)


@pytest.mark.parametrize(("case", "bits"), [("gptq", 5), ("w8a16", 8)])
def test_a_dry_run_plans_for_it(case, bits, checkpoint, capsys):
    directory, _ = checkpoint(case)
    for more, held in (([], bits if packing_pays() else 16), (["--device-memory", "80GB"], 4 if bits == 5 else 8)):
        assert main(["--dry-run", "--base", str(directory), *more]) == 0
        assert f"{held} bits a weight" in capsys.readouterr().out


def test_a_last_group_may_be_shorter():
    numbers, scales = torch.full((4, 192), 10, dtype=torch.uint8), torch.tensor([[1.0, 2.0]]).expand(4, 2)
    layout = Layout(("numbers",), lambda *_: Grouped(8, numbers, scales, torch.zeros(4, 2)), lambda _: [])
    weight = read_layer(layout, {"numbers": numbers}, 4, 192, {"bits": 8, "group_size": 128})
    assert weight.expand(torch.float32)[0].tolist() == [10.0] * 128 + [20.0] * 64
