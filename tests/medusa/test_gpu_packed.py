"""Packed weights with Triton kernels: on a GPU, or in Triton's interpreter, as test_attention_triton.py starts it."""

import copy
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

triton = pytest.importorskip("triton")

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads  # noqa: E402
from medusa.base import gguf, groupwise  # noqa: E402
from medusa.base.usual_block import UnusualBlockError  # noqa: E402
from medusa.cpu.gguf_types import KINDS  # noqa: E402
from medusa.cpu.packed import Packed  # noqa: E402
from medusa.gpu import packed as on_gpu  # noqa: E402
from medusa.gpu.packed import MOST_ROWS, PackedEmbedding, PackedLinear, expand, objection, product  # noqa: E402
from medusa.gpu.packed_weight import PackedWeight  # noqa: E402
from medusa.loading.self_test import choose_decoding, fuse  # noqa: E402
from tests.medusa.grouped import CASES  # noqa: E402
from tests.medusa.test_groupwise import checkpoint, model  # noqa: E402, F401
from tests.medusa.test_packed import mixed, quantised  # noqa: E402

from tests.medusa.gguf_files import write_file  # isort: skip  # noqa: E402

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not GPU and not triton.knobs.runtime.interpret, reason="there is no GPU")
DEVICE = torch.device("cuda" if GPU else "cpu")
KNOWN = [kind for kind in KINDS if kind != "MXFP4"]
ROUNDING = 2**-8 if GPU else 2**-7
"""Relative error of a result in bfloat16; the interpreter cuts numbers off."""


def weight_of(kind, outputs, inputs):
    """A weight on the device, and the one that an expanded model has."""
    packed = Packed.of(torch.from_numpy(quantised(kind, outputs, inputs)[0]), kind)
    return PackedWeight.of(packed, DEVICE), packed.expand().to(DEVICE)


def exactly(weight, indices=None):
    """Expanded weights, rounded by torch, as the interpreter does not round."""
    return expand(weight, indices, torch.float32).bfloat16()


def check_product(weight, whole, rows, bias=None, x=None):
    whole = whole if GPU else expand(weight, dtype=torch.float32)
    x = torch.randn(rows, whole.shape[1], device=DEVICE).bfloat16() if x is None else x
    bias_O = 0 if bias is None else bias.double()
    sums, sizes = x.double() @ whole.double().T + bias_O, x.double().abs() @ whole.double().abs().T
    found = product(x, weight, bias)
    assert found.dtype == torch.bfloat16 and found.shape == (rows, len(whole))
    assert ((found.double() - sums).abs() <= ROUNDING * sums.abs() + 2e-6 * sizes).all()


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("shape", [(96, 512), (37, 256), (1, 768), (130, 1536)])
def test_weights_are_those_of_an_expanded_model(kind, shape):
    weight, whole = weight_of(kind, *shape)
    assert torch.equal(exactly(weight), whole)
    some = torch.randint(shape[0], (3, 5), device=DEVICE)
    assert torch.equal(exactly(weight, some), whole[some])
    part = weight.part(16, 20) if shape[0] > 36 else weight
    assert torch.equal(exactly(part), whole[16:36] if shape[0] > 36 else whole)
    embeddings = PackedEmbedding(weight, torch.tensor(3.0, device=DEVICE).bfloat16())
    assert embeddings(some).shape == (3, 5, shape[1])
    if GPU:
        assert torch.equal(expand(weight), whole)
        assert torch.equal(embeddings(some), whole[some] * 3)


@pytest.mark.parametrize(
    ("kind", "most"), [("Q4_0", 5.0), ("Q5_1", 6.0), ("Q8_0", 8.5), ("Q4_K", 4.63), ("Q6_K", 8.57)]
)
def test_bytes_are_those_of_a_cpu(kind, most):
    assert weight_of(kind, 64, 512)[0].nbytes * 8 <= most * 64 * 512


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_products(kind, rows):
    weight, whole = weight_of(kind, 80, 768)
    check_product(weight, whole, rows, torch.randn(80, device=DEVICE).bfloat16())
    check_product(weight.part(16, 50), whole[16:66], rows)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 96, 576])
def test_groups_with_zero_points_and_inputs_that_do_not_fill_a_chunk(bits, group):
    numbers = torch.randint(1 << bits, (40, 576), dtype=torch.uint8)
    scales = (torch.randn(40, 576 // group) / 30).half()
    zeros = torch.randint(1 << bits, scales.shape, dtype=torch.uint8) if bits == 4 else torch.full(scales.shape, 128)
    packed = Packed.of_groups(numbers, scales, zeros.to(torch.uint8), bits)
    weight, whole = PackedWeight.of(packed, DEVICE), packed.expand().to(DEVICE)
    assert torch.equal(exactly(weight), whole)
    poisoned = torch.full((3, 700), torch.nan, device=DEVICE).bfloat16()
    poisoned[:, :576] = torch.randn(3, 576)
    check_product(weight, whole, 3, x=poisoned[:, :576])  # rows by stride; what stands behind them is not read
    check_product(weight, whole, 3, x=poisoned[:, :576].T.contiguous().T)


def test_few_programs_share_the_inputs_and_many_do_not(monkeypatch):
    weight, whole = weight_of("Q4_K", 80, 4096)
    check_product(weight, whole, 2, torch.randn(80, device=DEVICE).bfloat16())
    assert on_gpu._splits(1, 16, 100) == 8
    assert on_gpu._splits(500, 16, 100) == 1
    assert on_gpu._splits(1, 1, 100) == 1
    monkeypatch.setattr(on_gpu, "_splits", lambda *_: 1)
    check_product(weight, whole, 2, torch.randn(80, device=DEVICE).bfloat16())


def test_many_rows_meet_expanded_weights(monkeypatch):
    monkeypatch.setattr(on_gpu, "EXPANDED", 32 * 256)
    weight, whole = weight_of("Q4_1", 80, 256)
    rows = MOST_ROWS + 1
    x, bias = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((rows, 256), (80,)))
    expected = nn.functional.linear(x, whole, bias)
    assert (product(x, weight, bias) - expected).norm() < 0.01 * expected.norm()
    assert product(x[:0], weight, bias).shape == (0, 80)
    assert product(x[None, :6], weight).shape == (1, 6, 80)


def test_equal_layouts_are_joined():
    (first, whole), (second, _) = weight_of("Q4_K", 32, 512), weight_of("Q4_K", 20, 512)
    joined = PackedWeight.joined([first, second])
    assert torch.equal(exactly(joined), torch.cat([whole, exactly(second)]))
    assert torch.equal(exactly(joined.part(32, 20)), exactly(second))
    assert first.layout == second.layout != weight_of("Q4_1", 32, 512)[0].layout
    assert joined.nbytes == first.nbytes + second.nbytes


def test_kernels_are_tried_out_before_a_base_stays_packed(monkeypatch):
    assert objection.__wrapped__(DEVICE) is None
    with monkeypatch.context() as patched:
        patched.setattr(on_gpu, "product", lambda x, weight: product(x, weight) * 1.1)
        assert objection.__wrapped__(DEVICE) == "the kernels for them are wrong here (form 1)"
    with monkeypatch.context() as patched:
        patched.setattr(on_gpu, "expand", lambda weight, dtype: expand(weight, dtype=dtype).flip(0))
        assert objection.__wrapped__(DEVICE) == "the kernels for them are wrong here (form 1)"

    def fail(*_):
        raise triton.TritonError("out of resource: shared memory")

    monkeypatch.setattr(on_gpu, "product", fail)
    assert objection.__wrapped__(DEVICE) == "a kernel for them fails: out of resource: shared memory"
    monkeypatch.setattr(on_gpu, "module", lambda _: None)
    assert objection.__wrapped__(DEVICE) == "there is no Triton"


@pytest.fixture
def load(monkeypatch):
    """Load a base as for a GPU; without one, its packed layers compute on the CPU, in the interpreter."""
    if not GPU:
        of = PackedWeight.of
        monkeypatch.setattr(PackedWeight, "of", lambda packed, device: of(packed, DEVICE))
        monkeypatch.setattr("medusa.base.checkpoint.usable_device", torch.device)
        monkeypatch.setattr("medusa.base.checkpoint.objection", lambda _: objection(DEVICE))
        monkeypatch.setattr("medusa.base.checkpoint.pays", lambda _: True)
        monkeypatch.setattr(PreTrainedModel, "to", lambda model, *_: model)
    return lambda path, **how: BaseModel.load(path, device="cuda", pack=True, attention="triton", **how)


def blocks(name, numbers):
    """Queries and keys of one type, values of another; a matrix of bfloat16 among the rest."""
    if "attn_v" in name or "ffn_up" in name:
        return mixed(name, numbers)
    kind = "Q8_0" if "token_embd" in name else "Q4_1"
    return quantize(numbers, GGMLQuantizationType[kind]), kind


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    return write_file(path, "llama", LlamaConfig, tokenizer, sizes=sizes, blocks=blocks)


def same_logits(ours, theirs):
    tokens = torch.arange(3, 43)[None]
    with torch.inference_mode():
        found, expected = (base.model(tokens.to(base.device)).logits.float().cpu() for base in (ours, theirs))
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_a_gguf_file_stays_packed(file, load):
    base = load(file)
    layers = {name: one for name, one in base.model.named_modules() if isinstance(one, PackedLinear)}
    assert len(layers) == 2 * 6 + 1  # ffn_up is plain
    assert base.packed and isinstance(base.model.get_input_embeddings(), PackedEmbedding)
    assert base.model.get_output_embeddings().packed is base.model.get_input_embeddings().packed
    expanded = BaseModel.load(file, torch.bfloat16, DEVICE)
    assert base.weight_bytes < 0.75 * expanded.weight_bytes
    same_logits(base, expanded)
    tokens = torch.tensor([7, 3])
    hidden = torch.randn(2, 256, device=DEVICE).bfloat16()
    columns = base.logits(hidden)[:, tokens]
    assert (base.logits_of(tokens)(hidden) - columns).norm() < 0.02 * columns.norm()
    assert base.matrices is None and base.output.device.type == DEVICE.type


def test_texts_are_those_of_plain_decoding(file, load):
    base = fuse(choose_decoding(load(file)))
    assert base.fused and base.decoding == "tree"
    heads, gated = base._fused._layers[0].heads, base._fused._layers[0].gated
    assert [len(part.parts) for part in (heads, gated)] == [3, 2]  # of different types
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 2, base="", architecture="recurrent"))
    heads.init_from_base(base.lm_head_weight)  # they share its output layer and its embeddings
    drafted = MedusaModel(base, heads.to(base.device, base.dtype).eval(), graph=False)
    texts = [
        drafted.generate([5, 6, 7, 5, 6], max_new_tokens=4, nodes=nodes, drafter="hybrid", ignore_eos=True).tokens
        for nodes in (1, 3)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 4


def test_other_dtypes_and_training_expand(file, load, monkeypatch, caplog):
    assert not load(file, dtype=torch.float32).packed
    monkeypatch.setattr("medusa.base.checkpoint.objection", lambda _: "its kernels fail")
    with caplog.at_level(logging.WARNING, "medusa"):
        assert not load(file).packed
    assert "weights are expanded and take more memory, since on cuda its kernels fail" in caplog.text


def test_what_is_slower_here_stays_packed_only_where_it_must(file, load, checkpoint, monkeypatch):  # noqa: F811
    monkeypatch.setattr("medusa.base.checkpoint.pays", lambda _: False)
    expanded = gguf.expanded_bytes(gguf.locate(str(file)))
    for memory, packed in ((2 * expanded, False), (2 * expanded - 1, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, memory=memory: (0, memory))
        assert load(file).packed == packed
    assert load(checkpoint("awq")[0]).packed


@pytest.mark.skipif(not GPU, reason="it times")
def test_a_row_is_timed():
    assert isinstance(on_gpu.pays(DEVICE), bool)


@pytest.mark.parametrize("case", ["gptq", "awq", "w4a16, asymmetric", "w8a16"])
def test_checkpoints_of_groups_stay_packed(case, checkpoint, load):  # noqa: F811
    directory, _ = checkpoint(case)
    base = load(directory)
    assert base.packed and base.dtype == torch.bfloat16
    expanded = BaseModel.load(directory, torch.bfloat16, "cpu")
    same_logits(base, expanded)
    layer = base.with_fused_pass()._fused._layers[1]
    moved = base.model.model.layers[1].self_attn.k_proj.packed
    assert moved.whole is layer.heads.weight
    assert base.with_fused_pass()._fused._layers[1].heads.weight is layer.heads.weight  # joined once
    module = base.model.model.layers[1].mlp.gate_proj
    expected = expanded.model.get_submodule("model.layers.1.mlp.gate_proj").weight
    assert torch.equal(exactly(module.packed).cpu(), expected)


def test_only_the_usual_linear_layers_are_joined(file, load):
    base = load(file)
    base.model.model.layers[0].mlp.down_proj = nn.Sequential(base.model.model.layers[0].mlp.down_proj)
    with pytest.raises((UnusualBlockError, AttributeError)):
        base.with_fused_pass()


def test_what_the_kernels_do_not_know_is_left_to_transformers():
    def packs(case, dtype=None, **more):
        return groupwise.packs(SimpleNamespace(quantization_config=CASES[case] | more, dtype=torch.float16), dtype)

    assert packs("gptq") and packs("awq", torch.bfloat16)
    kinds = copy.deepcopy(CASES["w4a16"]["config_groups"])
    kinds["group_0"]["weights"]["actorder"] = "group"
    assert packs("w4a16") and not packs("w4a16", config_groups=kinds)
    assert not packs("gptq in another order")
    assert not packs("gptq", torch.float16)
    assert not packs("gptq", bits=3)
    plain = SimpleNamespace(dtype=torch.bfloat16)
    assert not groupwise.packs(plain, None)
    experts = json.loads('{"quant_method": "mxfp4"}')
    assert not groupwise.packs(SimpleNamespace(quantization_config=experts, dtype=torch.bfloat16), None)
