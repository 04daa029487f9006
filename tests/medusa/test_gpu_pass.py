"""The pass with Triton kernels: on a GPU, or in Triton's interpreter, as test_attention_triton.py starts it."""

import pytest
import torch

triton = pytest.importorskip("triton")

from medusa import BaseModel, MedusaModel  # noqa: E402
from medusa.base.usual_block import UnusualBlockError  # noqa: E402
from medusa.loading.self_test import choose_decoding, fuse  # noqa: E402
from tests.medusa import test_conformance  # noqa: E402
from tests.medusa.test_conformance import RECURRENT, SINGLE, tiny  # noqa: E402
from tests.medusa.test_native import rows_of  # noqa: E402

FUSED = [
    family
    for family in test_conformance.FUSED
    if family not in (*RECURRENT, *SINGLE) and not family.startswith("gemma4")
]
"""Recurrent layers, experts and Gemma 4 are the CPU's."""
GPU = torch.cuda.is_available()
LENGTHS = (40, 3) if GPU else (3,)
pytestmark = pytest.mark.skipif(not GPU and not triton.knobs.runtime.interpret, reason="there is no GPU")
ROUNDED = FUSED if GPU else ("gemma3_text", "glm4", "granite", "olmo3", "qwen2", "qwen3")
"""The interpreter is slow: norms on all sides, turned neighbours, scaled residuals, angles in float32, biases, norms
of heads."""
HALVES = [
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not GPU, reason="its products are wrong")),
]


def small(family, dtype=torch.float32, attention="triton"):
    """A small base of a family, with the same weights each time."""
    model = tiny(family)[0].model
    return BaseModel(model.to("cuda" if GPU else "cpu", dtype), None, family, attention)


@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_it_computes_what_the_family_computes(family):
    ours, theirs = (small(family, attention=name).tapped((3, 1)) for name in ("triton", "reference"))
    torch.testing.assert_close(rows_of(ours.with_fused_pass(), LENGTHS), rows_of(theirs, LENGTHS), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", ROUNDED)
@torch.inference_mode()
def test_it_rounds_where_the_family_rounds(family, dtype):
    """As near to the family's own pass in 16 bits as that one is to its pass in float32."""
    exact = rows_of(small(family, attention="reference"), LENGTHS)[1]
    theirs = rows_of(small(family, dtype, "reference"), LENGTHS)[1].float()
    ours = rows_of(small(family, dtype).with_fused_pass(), LENGTHS)[1].float()
    assert (ours - theirs).norm() < 2 * (theirs - exact).norm()


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2"])
def test_weights_are_joined_once_and_stay_the_model_s(family):
    base = small(family)
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    layers = base.with_fused_pass()._fused._layers
    again = base.with_fused_pass()._fused._layers
    for ours, theirs in zip(layers, again, strict=True):
        assert ours.heads.weight.data_ptr() == theirs.heads.weight.data_ptr()
        assert torch.equal(ours.gated.weight, theirs.gated.weight)
    after = base.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_only_the_usual_block_is_taken(caplog):
    with caplog.at_level("INFO", "medusa.loading.self_test"):
        assert fuse(small("llama")).fused
        assert not fuse(small("gpt2")).fused
    assert "the decoder (GPT2Model) has h, ln_f, wpe, wte" in caplog.text
    base = small("llama")
    base.model.model.layers[2].mlp.down_proj.weight.data = base.model.model.layers[2].mlp.down_proj.weight.data.double()
    with pytest.raises(UnusualBlockError, match="of a dtype"):
        base.with_fused_pass()


def test_texts_are_those_of_the_family_s_own_pass(base_directory):
    base = choose_decoding(BaseModel.load(base_directory, torch.float32, "cuda" if GPU else "cpu", attention="triton"))
    models = [MedusaModel(each, graph=False) for each in (base, base.with_fused_pass())]
    options = {"max_new_tokens": 8, "nodes": 6, "drafter": "prompt-lookup"}
    outputs = [model.generate([[5, 6, 7, 5, 6], [9]], **options) for model in models]
    assert [output.tokens for output in outputs[0]] == [output.tokens for output in outputs[1]]
