"""GGUF files as bases: weights stay packed, and the numbers are those of the file."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.base import checkpoint, gguf
from medusa.base.names import resolve_base
from medusa.budget.bound import step_work
from medusa.budget.plan import in_words
from medusa.budget.shape import read_shape
from medusa.cpu.gguf_types import KINDS
from medusa.cpu.int8 import Int8Linear
from medusa.cpu.native import NativeLinear, available, has_tiles, packing_pays, use_kernels
from medusa.cpu.packed import FOR_TILES, IN_LANES, Packed, PackedEmbedding, PackedLinear
from medusa.drafters.heads import HeadsDrafter
from medusa.loading.dtype import faster_dtype
from medusa.loading.self_test import choose_decoding, fuse
from medusa.sampling import SamplingParams, Speculation
from medusa.serve.model_options import describe
from medusa.serve.server import main
from tests.medusa.gguf_files import write_file
from tests.medusa.packed_sums import check_sums, same
from tests.medusa.states import decode_state

pytestmark = pytest.mark.skipif(not available(), reason="no C++ kernels on this machine")

TYPES = {
    "attn_q": "Q4_0",
    "attn_v": "Q4_K",
    "ffn_down": "Q6_K",
    "ffn_up": "BF16",
    "ffn_gate": "Q5_1",
    "token_embd": "Q8_0",
}
"""Others are of Q4_1."""


def quantised(kind, outputs, inputs):
    """Blocks of any bytes with small scales, and what they stand for."""
    _, numbers, size = KINDS[kind]
    chance = np.random.default_rng(0)
    blocks = chance.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)
    scales = (
        (chance.normal(size=(*blocks.shape[:2], 2)) / (3000 if numbers > 32 else 50)).astype(np.float16).view(np.uint8)
    )
    if kind == "MXFP4":  # powers of 2
        blocks[..., 0] = chance.integers(110, 125, blocks.shape[:2])
        blocks = blocks.reshape(outputs, -1)
        return blocks, dequantize(blocks, GGMLQuantizationType[kind])
    places = {"Q6_K": [-2, -1], "Q4_0": [0, 1], "Q5_0": [0, 1], "Q8_0": [0, 1]}.get(kind, [0, 1, 2, 3])
    blocks[..., places] = scales[..., : len(places)]
    blocks = blocks.reshape(outputs, -1)
    return blocks, dequantize(blocks, GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 512), (37, 256), (1, 768), (200, 1024)])
def test_numbers_and_sums_are_those_of_expanded_weights(kind, shape, monkeypatch):
    monkeypatch.setattr("medusa.cpu.packed.SLICE", 20_000)
    blocks, weight = (torch.from_numpy(one) for one in quantised(kind, *shape))
    packed, rounded = Packed.of(blocks, kind), weight.bfloat16()
    some = torch.randint(shape[0], (3, 50))
    for order in (FOR_TILES, IN_LANES):
        ordered = packed.ordered(order)
        assert torch.equal(ordered.expand(), rounded)
        assert torch.equal(ordered._expand(ordered.parts)[: shape[0]], rounded)  # without kernels
        assert torch.equal(ordered.rows(some), rounded[some])
        assert torch.equal(ordered.ordered(FOR_TILES).parts, packed.parts)
    assert torch.equal(PackedEmbedding(packed, torch.tensor(3.0).bfloat16())(some), rounded[some] * 3)
    check_sums(packed, weight)


@pytest.mark.parametrize(
    ("kind", "most"),
    [("Q4_1", 5.0), ("Q5_1", 6.0), ("Q8_0", 8.5), ("MXFP4", 4.25), ("Q4_K", 4.63), ("Q5_K", 5.63), ("Q6_K", 8.57)],
)
def test_what_is_packed_takes_what_it_takes_in_the_file_or_8_bits(kind, most):
    packed = Packed.of(torch.from_numpy(quantised(kind, 64, 512)[0]), kind)
    assert packed.parts.numel() * 8 <= most * 64 * 512


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, 384])
def test_weights_of_groups(bits, group):
    numbers = torch.randint(1 << bits, (40, 384), dtype=torch.uint8)
    scales = (torch.randn(40, 384 // group) / 30).bfloat16()
    zeros = torch.randint(1 << bits, scales.shape, dtype=torch.uint8) if bits == 4 else torch.full(scales.shape, 128)
    packed = Packed.of_groups(numbers, scales, zeros.to(torch.uint8), bits)
    spread = [x.float().repeat_interleave(group, 1) for x in (scales, zeros)]
    weight = (numbers.float() - spread[1]) * spread[0]
    assert torch.equal(packed.expand(), weight.bfloat16())
    check_sums(packed, weight)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0", "MXFP4"])
def test_rows_of_any_size(kind):
    """Results grow with rows, a row without numbers gives none, and other rows do not see it."""
    layer = PackedLinear(Packed.of(torch.from_numpy(quantised(kind, 40, 512)[0]), kind))
    rows = torch.randn(3, 512).bfloat16()
    expected = layer(rows)
    for power in (-60, -30, 30, 90):
        assert torch.equal(layer(rows * 2.0**power), expected * 2.0**power)
    assert layer(torch.zeros_like(rows)).count_nonzero() == 0
    for odd in (torch.nan, torch.inf):
        rows[1, 70] = odd
        found = layer(rows)
        assert torch.equal(found[::2], expected[::2]) and not found[1].isfinite().any()


def test_outputs_of_a_packed_layer_become_layers():
    packed = Packed.of(torch.from_numpy(quantised("Q4_K", 100, 256)[0]), "Q4_K")
    parts = packed.split([32, 48, 20])
    assert torch.equal(torch.cat([part.expand() for part in parts]), packed.expand())


def mixed(name, numbers):
    """Blocks of many types in one file."""
    kind = next((kind for part, kind in TYPES.items() if part in name), "Q4_1")
    blocks = quantised(kind, *numbers.shape)[0] if kind.endswith("K") else quantize(numbers, GGMLQuantizationType[kind])
    return blocks, kind


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer):
    """A small Llama as llama.cpp would write it."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    return write_file(path, "llama", LlamaConfig, tokenizer, sizes=sizes, blocks=mixed)


@pytest.fixture(scope="module")
def bases(file):
    """The model with its weights packed, and as transformers expands them."""
    how = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    directory = gguf.locate(str(file))
    packed = gguf.load(directory, torch.bfloat16, expand=False)
    expanded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **how)
    for model in (packed, expanded):
        use_kernels(model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [fuse(choose_decoding(BaseModel(model, tokenizer))) for model in (packed, expanded)]


def test_the_dtype_of_packed_weights_is_not_timed(file, caplog):
    model = gguf.load(gguf.locate(str(file)), torch.bfloat16, expand=False)
    use_kernels(model)
    with caplog.at_level(logging.INFO, "medusa"):
        assert faster_dtype(BaseModel(model, None)) == torch.bfloat16
    said = [message for message in caplog.messages if message.startswith("dtype")]
    assert said == ["dtype bfloat16: that of the checkpoint, since its weights stay packed"]


@pytest.fixture(scope="module")
def pair(bases):
    assert all(base.fused and base.dtype == torch.bfloat16 for base in bases)
    heads = some_heads(bases[0])
    return [MedusaModel(base, heads) for base in bases]


def some_heads(base):
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(256, base.vocab_size, 3, architecture="recurrent")).bfloat16()
    heads.init_from_base(base.lm_head_weight)
    return heads


def test_matrices_stay_packed_and_other_types_are_expanded(bases):
    packed, expanded = bases
    kinds = {name.split(".")[-1]: type(module) for name, module in packed.model.named_modules() if "proj" in name}
    assert kinds.pop("up_proj") is NativeLinear
    assert set(kinds.values()) == {PackedLinear} == {type(packed.model.get_output_embeddings())}
    assert (packed.packed, expanded.packed) == (True, False)
    assert packed.weight_bytes < 0.55 * expanded.weight_bytes


def test_a_file_is_a_base_by_its_path(file):
    base = BaseModel.load(file, device="cpu", pack=True)
    assert (type(base.model.get_output_embeddings()) is PackedLinear) == packing_pays()
    assert (
        base.source
        == "weights of the GGUF file small.gguf (Q4_0, Q4_1, Q4_K, Q5_1, Q6_K, Q8_0 kept packed), as bfloat16"
    )
    assert resolve_base(str(file)) == str(file)


@pytest.mark.parametrize(("drafter", "temperature"), [("heads", 0.9), ("prompt-lookup", 0.0), ("early-exit", 0.0)])
def test_texts_are_those_of_the_base(pair, drafter, temperature):
    prompts = [[5, 9, 5, 9, 5], list(range(3, 60)), [7]]
    sampling = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
    plain = [pair[0].generate(p, sampling=sampling, speculation=Speculation(nodes=1)).tokens for p in prompts]
    how = Speculation(drafter, nodes=6)
    for model in pair if has_tiles() else pair[:1]:
        assert [model.generate(p, sampling=sampling, speculation=how).tokens for p in prompts] == plain
    together = pair[0].batch()
    requests = [together.add(p, sampling, how) for p in prompts]
    while len(together):
        together.step()
    assert [request.output.tokens for request in requests] == plain


def test_logits_are_those_of_the_expanded_base(bases):
    tokens = torch.randint(0, bases[0].vocab_size, (2, 40))
    logits = [base.model(tokens).logits for base in bases]
    assert same(*logits)
    assert logits[0].std() > 0.1


def test_what_would_leave_little_room_stays_packed_on_any_processor(file, monkeypatch, caplog):
    monkeypatch.setattr("medusa.base.checkpoint.packing_pays", lambda: False)
    assert not BaseModel.load(file, device="cpu", pack=True).packed
    whole = gguf.expanded_bytes(gguf.locate(str(file)))
    monkeypatch.setattr("medusa.base.checkpoint.machine_memory", lambda: 2 * whole - 1)
    with caplog.at_level(logging.INFO, "medusa"):
        assert BaseModel.load(file, device="cpu", pack=True).packed
    assert f"they would take {whole} of {2 * whole - 1} bytes" in caplog.text


def test_accelerators_without_kernels_expand(caplog):
    with caplog.at_level(logging.WARNING, "medusa"):
        assert not checkpoint._stays_packed_on(torch.device("mps"), 0)
    assert "since on mps there are no kernels for them" in caplog.text


def test_int8_rounds_the_inputs_of_packed_layers_and_not_their_weights(file, pair):
    exact, rounded = pair[0].base, fuse(choose_decoding(BaseModel.load(file, device="cpu", pack=True, int8=True)))
    assert rounded.fused
    assert rounded.int8
    for name, layer in exact.model.named_modules():
        if isinstance(layer, PackedLinear):
            other = rounded.model.get_submodule(name)
            assert isinstance(other, Int8Linear)
            assert torch.equal(other.weight, layer.weight)
    output, embeddings = rounded.model.get_output_embeddings(), rounded.model.get_input_embeddings()
    assert output.packed is embeddings.packed
    tokens = torch.arange(3, 60)[None]
    assert torch.equal(rounded.embed(tokens), exact.embed(tokens))
    with torch.inference_mode():
        ours, theirs = (one.logits(one.hidden_states(tokens)[0]).float() for one in (rounded, exact))
    assert 0 < (ours - theirs).norm() / theirs.norm() < 0.1
    models = [MedusaModel(base, some_heads(base)) for base in (rounded, exact)]
    state = decode_state([[3, 4, 5], [6, 7]], exact)
    drafts = [HeadsDrafter(model.heads, model.base, 10**4).propose(state).tokens for model in models]
    assert torch.equal(*drafts)
    prompts = [[5, 9, 5, 9, 5], list(range(3, 60)), [7]]
    texts = [[out.tokens for out in models[0].generate(prompts, max_new_tokens=20, nodes=n)] for n in (6, 1)]
    assert texts[0] == texts[1]


def test_training_reads_the_same_numbers(file, pair):
    plain, expanded = BaseModel.load(file, torch.bfloat16, "cpu"), pair[1].base.model.state_dict()
    assert not any(isinstance(module, PackedLinear) for module in plain.model.modules())
    assert plain.model.state_dict().keys() == expanded.keys()
    assert all(torch.equal(weight, expanded[name]) for name, weight in plain.model.state_dict().items())


def test_what_a_pass_reads_is_told(pair):
    packed, expanded = (model.base for model in pair)
    held = sum(one.nbytes for one in gguf_weights(packed))
    assert packed.weight_bytes == held
    shape = read_shape(packed.config, packed.dtype)
    rows = shape.vocabulary * shape.itemsize
    assert step_work(replace(shape, held=held), 1, 0).weights == held + rows
    assert step_work(shape, 1, 0).weights == pytest.approx(expanded.weight_bytes + rows, rel=0.01)
    assert f"packed weights ({in_words(held)}), fused pass" in describe(pair[0], "heads")
    assert "packed" not in describe(pair[1], "heads").splitlines()[-1]


def gguf_weights(base):
    """Packed parts of layers that a pass computes, and all other tensors."""
    layers = [one for one in base.model.modules() if isinstance(one, PackedLinear)]
    return [*(one.packed.parts for one in layers), *base.model.parameters(), *base.model.buffers()]


def test_a_dry_run_plans_for_it(file, capsys):
    assert main(["--dry-run", "--base", str(file)]) == 0
    assert ("8 bits a weight" if packing_pays() else "16 bits a weight") in capsys.readouterr().out
    assert main(["--dry-run", "--base", str(file), "--dtype", "float32"]) == 0
    assert "32 bits a weight" in capsys.readouterr().out
    assert main(["--dry-run", "--base", str(file), "--device-memory", "8e9"]) == 0  # packed on a GPU
    assert "8 bits a weight" in capsys.readouterr().out


def test_a_file_is_read_once_and_again_when_it_has_changed(file, tmp_path, caplog):
    copy = tmp_path / "again.gguf"
    copy.write_bytes(file.read_bytes())
    with caplog.at_level(logging.INFO, "medusa"):
        first = gguf.locate(str(copy))
        assert gguf.locate(str(copy)) == first
        assert caplog.text.count("reading the GGUF file") == 1
        copy.write_bytes(file.read_bytes() + b"\0" * 32)
        assert gguf.locate(str(copy)) != first
