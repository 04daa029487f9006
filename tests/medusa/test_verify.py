"""The parts of the verifier; tests/medusa/test_conformance.py tests the whole."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa import BaseModel
from medusa.cpu.packed import PackedLinear, available, pack_linears, with_enough_rows

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
"""The models are float64, but their norms and softmaxes go through float32."""


def test_without_a_plan_attention_is_transformers_own(base, base_directory):
    ids = torch.randint(1, 200, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    plain = AutoModelForCausalLM.from_pretrained(base_directory, dtype=torch.float64, attn_implementation="eager")
    parts = [plain.model(ids[:, :5]).last_hidden_state, plain.model(ids[:, 5:]).last_hidden_state]
    torch.testing.assert_close(base.hidden_states(ids, positions), torch.cat(parts, dim=1), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_compute_the_same(dtype):
    if not available(dtype):
        pytest.skip("this torch has no oneDNN packing")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.SiLU(), torch.nn.Linear(256, 4, bias=False)).to(
        dtype
    )
    x = torch.randn(2, 3, 128, dtype=dtype)
    with torch.no_grad():
        expected = plain(x)
        assert pack_linears(plain) == 2
        assert isinstance(plain[0], PackedLinear)
        assert not hasattr(plain[0], "weight"), "the plain copy is not kept"
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(plain(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 1, 64), (3, 2, 64)])
def test_too_few_rows_travel_with_rows_of_zeros(shape):
    weight, x, seen = torch.randn(5, 64), torch.randn(shape), []

    def product(rows):
        seen.append(rows.shape[:-1].numel())
        return rows @ weight.T

    torch.testing.assert_close(with_enough_rows(product, x, 4), x @ weight.T)
    assert seen == [max(4, x.shape[:-1].numel())]


class Scaled(torch.nn.Linear):
    """Computes something else than its weight says, as quantised layers do."""

    def forward(self, x):
        return 2 * super().forward(x)


class Quantised(torch.Tensor):
    """A weight that says how it is multiplied, as torchao's do."""


def test_packing_leaves_what_is_not_plain_alone():
    layers = torch.nn.Sequential(Scaled(128, 256), torch.nn.Linear(256, 128))
    layers[1].weight = torch.nn.Parameter(layers[1].weight.detach().as_subclass(Quantised))
    assert type(layers[1].weight) is not torch.nn.Parameter
    assert pack_linears(layers) == 0


@pytest.mark.parametrize("options", [{"device_map": "auto"}, {"quantization_config": "int8"}])
def test_a_base_that_is_spread_or_quantised_stays_where_transformers_puts_it(base_directory, monkeypatch, options):
    """The options reach transformers; a machine with accelerate and torchao takes them from there."""
    load, asked = AutoModelForCausalLM.from_pretrained, {}

    def loading(name, dtype, **rest):
        asked.update(rest)
        model = load(name, dtype=dtype)
        monkeypatch.setattr(model, "to", None)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    base = BaseModel.load(base_directory, dtype=torch.float32, device="cpu", pack=True, load_options=options)
    assert asked == options
    assert base.logits(base.hidden_states(torch.tensor([[1, 2, 3]]))).shape == (1, 3, base.vocab_size)


def test_a_device_map_needs_accelerate(base_directory):
    if importlib.util.find_spec("accelerate"):
        pytest.skip("accelerate is installed")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*accelerate"):
        BaseModel.load(base_directory, load_options={"device_map": "auto"})
