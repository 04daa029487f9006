"""Layers that differ in the C++ pass: Gemma 4's, in the shapes of its models, against transformers' own code."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa import BaseModel
from medusa.base import gguf, gguf_convert
from medusa.base.uneven_block import key_sources
from medusa.base.usual_block import UnusualBlockError
from medusa.cache import CachedSequence
from medusa.cpu import fused as module
from medusa.cpu.experts import use_experts
from medusa.cpu.int8 import round_linears
from medusa.cpu.native import available, use_kernels
from medusa.loading import exactness
from medusa.loading.self_test import choose_decoding, fuse
from medusa.tree import Draft
from tests.medusa.passes import verify
from tests.medusa.test_conformance import config_of, make_uneven
from tests.medusa.test_gguf_families import unpacked
from tests.medusa.test_native import rows_of

pytestmark = pytest.mark.skipif(not available(), reason="there is no C++ compiler here")

BF16, SINGLE = torch.bfloat16, torch.float32
KEYS = {
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
SHAPES = {
    "31B": KEYS,
    "E2B": {"num_hidden_layers": 5, "layer_types": ["sliding_attention", *2 * ["sliding_attention", "full_attention"]]},
    "26B": KEYS | EXPERTS,
    "odd": {
        "hidden_size": 36, "intermediate_size": 50, "head_dim": 6, "global_head_dim": 10, "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 5, "attention_k_eq_v": True,
    },
}  # fmt: skip
"""Odd: sizes that fill no vector."""
SHAPES["odd experts"] = SHAPES["odd"] | EXPERTS | {"num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 20}
UNDONE = {
    "31B": {
        "norms of values": ("norms_of", lambda norms: norms._replace(value=None)),
        "factors": ("scale_of", lambda _: 1.0),
        "positions of long layers": ("rotaries_of", lambda found: (found[0], [kind or -1 for kind in found[1]])),
    },
    "E2B": {
        "factors": ("scale_of", lambda _: 1.0),
        "the last keys": ("key_sources", lambda found: [0 if index == 1 else index for index in found]),
        "per-layer embeddings": ("layer_inputs_of", lambda parts: parts._replace(share=0.0)),
        "of tokens": ("layer_inputs_of", lambda parts: parts._replace(embeddings=other(parts.embeddings))),
        "what is projected": ("layer_inputs_of", lambda parts: parts._replace(projection=other(parts.projection))),
        "their norm": ("layer_inputs_of", lambda parts: parts._replace(norm=other(parts.norm))),
        "the norm behind them": ("norms_of", lambda norms: norms._replace(inputs=torch.ones_like(norms.inputs))),
    },
    "26B": {
        "factors of experts": ("FusedPass._mixture", lambda mixture: changed(mixture, scales=None)),
        "what the router reads": ("FusedPass._mixture", lambda mixture: changed(mixture, router_norm=None)),
        "its factors": ("FusedPass._mixture", lambda mixture: changed(mixture, router_scale=mixture.router_norm)),
        "its size": ("FusedPass._mixture", lambda mixture: changed(mixture, router_factor=1.0)),
        "the norm of what experts read": ("FusedPass._mixture", lambda mixture: changed(mixture, norm=None)),
        "of what they give": ("FusedPass._mixture", lambda mixture: changed(mixture, after=mixture.router_norm)),
        "of what the MLP gives": ("FusedPass._mixture", lambda mixture: changed(mixture, beside=mixture.router_norm)),
        "of both": ("norms_of", lambda norms: norms._replace(mlp_after=torch.ones_like(norms.mlp_after))),
    },
}


def changed(mixture, **fields):
    """The mixture with other fields; the weight of its router's norm is ones."""
    for name, value in fields.items():
        setattr(mixture, name, value)
    return mixture


def other(module):
    """The same with other weights."""
    module = copy.deepcopy(module)
    module.weight.data = module.weight.data.flip(0)
    return module


def small(shape, dtype=SINGLE):
    torch.manual_seed(0)
    config = config_of("gemma4_text", **SHAPES[shape])
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    make_uneven(model)
    if shape == "odd experts":
        use_experts(model)  # torch's grouped products take no such sizes in 16 bits
    use_kernels(model)
    return BaseModel(model, None, shape, "exact")


@pytest.mark.parametrize("dtype", [BF16, torch.float16, SINGLE], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_taken_at_load_and_rows_are_equal_bit_by_bit(shape, dtype):
    base = choose_decoding(small(shape, dtype))
    assert base.decoding == "tree"
    fused = fuse(base)
    assert fused.fused and fused.shallow(2).fused
    assert exactness.find_out(fused).exact


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_they_are_computed_as_the_family_computes_them(shape):
    base = small(shape).tapped((3, 1))
    fused = base.with_fused_pass()
    for ours, theirs in ((fused, base), (fused.shallow(2), base.shallow(2))):
        torch.testing.assert_close(rows_of(ours), rows_of(theirs), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_they_round_where_the_family_rounds(shape, dtype):
    """As near to the family's own pass in 16 bits as that one is to its pass in float32."""
    base = small(shape, dtype)
    theirs, ours = rows_of(base)[1].float(), rows_of(base.with_fused_pass())[1].float()
    exact = rows_of(BaseModel(base.model.float(), None, shape, "exact"))[1]
    assert (ours - theirs).norm() < (theirs - exact).norm()


@pytest.mark.parametrize(("shape", "part"), [(shape, part) for shape, parts in UNDONE.items() for part in parts])
@torch.inference_mode()
def test_every_part_matters(shape, part, monkeypatch):
    """The comparisons above would fail without it, and so does the test at load."""
    base = small(shape)
    theirs = rows_of(base)[1]
    name, undo = UNDONE[shape][part]
    *owner, name = name.split(".")
    place = getattr(module, *owner) if owner else module
    found = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args: undo(found(*args)))
    assert (rows_of(base.with_fused_pass())[1] - theirs).norm() > 0.02 * theirs.norm()
    assert not fuse(base).fused


@pytest.mark.parametrize("int8", [False, True], ids=["packed", "int8"])
@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_text-keys", "gemma4_text-experts"])
@torch.inference_mode()
def test_packed_weights_stay_packed(family, int8, tmp_path):
    gguf_convert.convert(unpacked(family, tmp_path), tmp_path / "base")
    model = gguf.load(tmp_path / "base", BF16, expand=False).eval()
    if int8:
        round_linears(model, model.get_output_embeddings())
    plain = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    assert all(name.endswith("router.proj") for name in plain) and bool(plain) == (family == "gemma4_text-experts")
    base = choose_decoding(BaseModel(model, None, family, "exact", int8=int8))
    fused = fuse(base)
    assert fused.fused and exactness.find_out(fused).exact
    theirs, ours = rows_of(base)[1].float(), rows_of(fused)[1].float()
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_layers_share_keys_of_the_last_of_their_type_that_keeps_them(monkeypatch):
    base = small("E2B")
    assert base.spans and key_sources(base.decoder) == [0, 1, 2, 1, 2]
    base.decoder.layers[2].self_attn.store_full_length_kv = False
    with pytest.raises(UnusualBlockError, match="a layer shares keys that none keeps in its sizes"):
        base.with_fused_pass()


def add_bias(layer):
    layer.router.proj.bias = torch.nn.Parameter(torch.zeros(4))


def share_otherwise(layer):
    shares = type(layer.router).forward
    layer.router.forward = lambda rows: (None, shares(layer.router, rows)[1] ** 2, shares(layer.router, rows)[2])


def norm_otherwise(layer):
    layer.router.norm.eps = 0.1


OTHERS = {
    add_bias: "a layer (Gemma4TextDecoderLayer) has experts, ",
    share_otherwise: "its router is Gemma4TextRouter",
    norm_otherwise: "a norm that should have no weight is of another kind",
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_experts_beside_an_mlp_are_left_to_transformers(change, caplog):
    base = small("26B")
    change(base.decoder.layers[1])
    with caplog.at_level(logging.INFO, logger="medusa"):
        assert not fuse(base).fused
    assert f"runs as transformers does: {OTHERS[change]}" in caplog.text


def test_a_token_without_per_layer_embeddings_is_refused():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("gemma4_text", vocab_size_per_layer_input=40)).eval()
    base = BaseModel(model, None, "fewer", "exact").with_fused_pass()
    verify(base, [CachedSequence(base.new_pool())], Draft.chain(torch.tensor([[3, 39]])))
    with pytest.raises(IndexError, match="token id"):
        verify(base, [CachedSequence(base.new_pool())], Draft.chain(torch.tensor([[3, 40]])))
