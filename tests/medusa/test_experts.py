"""The kernel of experts, against transformers' own code for them."""

import copy

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from medusa.cpu.experts import IMPLEMENTATION, are_usual, experts_forward, use_experts
from tests.medusa.test_conformance import tiny

USUAL = (
    "afmoe", "deepseek_v3", "granitemoehybrid", "lfm2_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Families with experts that the kernel knows."""


def experts_of(family, dtype=torch.float32):
    model = copy.deepcopy(tiny(family)[0].model).to(dtype)
    return model, [part for part in model.modules() if are_usual(part)]


@pytest.mark.parametrize("family", [*USUAL, "gpt_oss", "nemotron_h", "llama"])
def test_the_usual_experts_are_found(family):
    model, found = experts_of(family)
    assert bool(found) == (family in USUAL)
    assert use_experts(model) == len(found)
    assert all(part.config._experts_implementation == IMPLEMENTATION for part in found)
    assert IMPLEMENTATION not in model.config.to_json_string()


@pytest.mark.parametrize("family", USUAL)
@torch.inference_mode()
def test_hidden_states_are_the_family_s(family):
    model, _ = experts_of(family)
    theirs, text = copy.deepcopy(model), torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    use_experts(model)
    torch.testing.assert_close(model(text).logits, theirs(text).logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "top"), [(1, 1), (1, 2), (5, 2), (40, 3)])
@torch.inference_mode()
def test_rows_are_those_of_float64_and_equal_in_any_company(rows, top, dtype):
    torch.manual_seed(0)
    experts = experts_of("qwen3_moe", dtype)[1][0]
    count, inner, hidden = len(experts.gate_up_proj), experts.gate_up_proj.shape[1], experts.gate_up_proj.shape[2]
    x = torch.randn(rows, hidden).to(dtype)
    chosen = torch.stack([torch.randperm(count)[:top] for _ in range(rows)])
    chosen[:, 0] = chosen[:, 0].clamp(max=1)  # many rows visit the same
    shares = torch.rand(rows, top).to(dtype)
    ours = experts_forward(experts, x, chosen, shares)
    exact = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        for expert, share in zip(chosen[row], shares[row].double(), strict=True):
            gate, up = (experts.gate_up_proj[expert].double() @ x[row].double()).split(inner // 2)
            made = torch.nn.functional.silu(gate) * up
            exact[row] += share * (experts.down_proj[expert].double() @ made)
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert (ours.double() - exact).norm() < close * exact.norm()
    for row in range(rows):
        alone = experts_forward(experts, x[row : row + 1], chosen[row : row + 1], shares[row : row + 1])
        assert torch.equal(alone[0], ours[row])


def test_gradients_pass_as_before():
    model, (experts, *_) = experts_of("qwen3_moe")
    model.requires_grad_(False)
    use_experts(model)
    x = torch.randn(3, experts.gate_up_proj.shape[2], requires_grad=True)
    chosen, shares = torch.tensor([[0, 1], [1, 2], [0, 2]]), torch.rand(3, 2)
    experts(x, chosen, shares).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, x, chosen, shares).sum().backward()
    assert torch.equal(x.grad, expected) and expected.any()
