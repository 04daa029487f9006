"""The kernel of experts, against transformers' own code for them."""

import copy

import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from medusa import BaseModel
from medusa.base.mixture_block import MixtureParts, mixture_of, routing_of
from medusa.cache import CachedSequence
from medusa.cpu.experts import IMPLEMENTATION, Gate, PackedExperts, are_known, experts_forward, use_experts
from medusa.cpu.int8 import round_linears
from medusa.cpu.native import use_kernels
from medusa.cpu.packed import Packed
from medusa.loading.exactness import find_out
from medusa.loading.self_test import choose_decoding, fuse
from medusa.tree import Draft
from tests.medusa.packed_sums import same
from tests.medusa.test_conformance import config_of, tiny

KNOWN = (
    "afmoe", "deepseek_v2", "deepseek_v3", "gemma4_text-26b", "gpt_oss", "granitemoehybrid", "lfm2_moe", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Families with experts that the kernel knows."""
FUSED = (
    "gemma4_text-26b", "gpt_oss", "lfm2_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text",
)  # fmt: skip
"""Those whose whole pass it computes."""
SILU = Gate(gelu=False)


def experts_of(family, dtype=torch.float32):
    model = copy.deepcopy(tiny(family)[0].model).to(dtype)
    return model, [part for part in model.modules() if are_known(part)]


@pytest.mark.parametrize("family", [*KNOWN, "nemotron_h", "llama"])
def test_the_usual_experts_are_found(family):
    model, found = experts_of(family)
    assert bool(found) == (family in KNOWN)
    assert use_experts(model) == len(found)
    replaced = [part for part in model.modules() if isinstance(part, PackedExperts)]
    assert bool(replaced) == (family == "gpt_oss")
    assert all(replaced or part.config._experts_implementation == IMPLEMENTATION for part in found)
    assert IMPLEMENTATION not in model.config.to_json_string()


@pytest.mark.parametrize("family", KNOWN)
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
@torch.inference_mode()
def test_packed_weights_give_the_sums_of_expanded_ones(kind):
    torch.manual_seed(0)
    count, inner, hidden, rows = 5, 32, 64, 23
    packed = [
        Packed.of(torch.from_numpy(quantize(torch.randn(*shape).numpy(), GGMLQuantizationType[kind])), kind)
        for shape in ((count * 2 * inner, hidden), (count * hidden, inner))
    ]
    ours, whole = PackedExperts(*packed, count, SILU), PackedExperts(*(one.expand() for one in packed), count, SILU)
    x, shares = torch.randn(rows, hidden, dtype=torch.bfloat16), torch.rand(rows, 2)
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(rows)])
    assert same(ours(x, chosen, shares), whole(x, chosen, shares), 0.01)
    assert torch.equal(ours(x[:1], chosen[:1], shares[:1])[0], ours(x, chosen, shares)[0])
    lossy, exact = ours.rounded()(x, chosen, shares).float(), ours(x, chosen, shares).float()
    assert 1e-4 < (lossy - exact).norm() / exact.norm() < 0.03
    assert torch.equal(ours.rounded()(x[:1], chosen[:1], shares[:1])[0], ours.rounded()(x, chosen, shares)[0])
    with pytest.raises(RuntimeError, match=r"rows of torch\.float32 do not fit experts of torch\.bfloat16"):
        ours(x.float(), chosen, shares)


@pytest.mark.parametrize(
    ("dtype", "int8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
)
@pytest.mark.parametrize("family", FUSED)
def test_rows_of_a_fused_pass_are_equal_in_any_company(family, dtype, int8):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family)).to(dtype).eval()
    if int8:
        assert round_linears(model, model.get_output_embeddings()) > len(experts_of(family)[1])
    use_kernels(model)
    base = fuse(choose_decoding(BaseModel(model, None, family, int8=int8)))
    assert base.fused
    assert find_out(base).exact


@pytest.mark.parametrize("normalized", [True, False])
def test_of_equal_experts_the_first_are_visited(normalized):
    """As scores of 16 bits often are; then a text does not depend on how ties are broken."""
    base, _ = tiny("qwen3_moe", "exact")
    for layer in base.decoder.layers:
        layer.mlp.gate.norm_topk_prob = normalized
        layer.mlp.gate.weight.data[:] = layer.mlp.gate.weight.data[:1]
        layer.mlp.experts.down_proj.data[2:] = float("nan")
    fused, text = base.with_fused_pass(), torch.tensor([[5, 6, 7, 8, 9]])
    pool = fused.new_pool()
    hidden = fused.run(pool, fused.plan([(Draft.chain(text), [CachedSequence(pool)])]))
    assert hidden.isfinite().all()
    expected = base.model.model(text).last_hidden_state[0]
    if expected.isfinite().all():
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_other_routers_are_not_taken_for_a_softmax():
    found = {family: mixture_of(tiny(family)[0].decoder.layers[1]) for family in FUSED}
    routing = {family: routing_of(parts) for family, parts in found.items()}
    normalized = {"gemma4_text-26b", "gpt_oss", "lfm2_moe", "mixtral", "qwen3_5_moe_text"}
    assert {family for family, one in routing.items() if one.normalized} == normalized
    assert {family for family, one in routing.items() if one.sigmoid} == {"lfm2_moe"}
    assert not any(one.whole for one in routing.values()), "the dtype is that of weights"
    for parts in found.values():
        parts.router.to(torch.bfloat16)
    halves = {family: routing_of(parts) for family, parts in found.items()}
    assert [family for family, one in halves.items() if one.whole] == ["gemma4_text-26b", "mixtral"]
    assert mixture_of(tiny("llama")[0].decoder.layers[0]) is None

    class Tanh(torch.nn.Module):
        top_k, weight = 2, torch.randn(4, 32)

        def forward(self, rows):
            scores = torch.nn.functional.linear(rows, self.weight)
            return scores, *scores.tanh().topk(self.top_k)

    for other in (Tanh(), torch.nn.Linear(32, 4)):
        assert routing_of(MixtureParts(other, other, None, None, None, None)) is None


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@torch.inference_mode()
def test_mlps_beside_layers_of_experts_have_their_own_activation_and_size(activation):
    torch.manual_seed(0)
    options = {"mlp_only_layers": [1], "hidden_act": activation, "intermediate_size": 80, "initializer_range": 0.1}
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe", **options)).eval()
    fused, text = BaseModel(model, None, "qwen3_moe").with_fused_pass(), torch.tensor([[5, 6, 7, 8, 9]])
    pool = fused.new_pool()
    hidden = fused.run(pool, fused.plan([(Draft.chain(text), [CachedSequence(pool)])]))
    torch.testing.assert_close(hidden, model.model(text).last_hidden_state[0], atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@torch.inference_mode()
def test_threads_that_come_late_do_not_take_the_next_layer_s_experts():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe", num_experts=60, num_hidden_layers=4)).eval()
    fused, text = BaseModel(model, None, "qwen3_moe").with_fused_pass(), torch.randint(3, 30, (1, 40))

    def hidden():
        pool = fused.new_pool()
        return fused.run(pool, fused.plan([(Draft.chain(text), [CachedSequence(pool)])]))

    threads, expected = torch.get_num_threads(), hidden()
    torch.set_num_threads(8)  # more than most machines have free
    try:
        assert all(torch.equal(hidden(), expected) for _ in range(2000))
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def test_experts_are_chosen_with_a_bias_that_is_no_part_of_shares():
    base, _ = tiny("lfm2_moe", "exact")
    found = [parts for layer in base.decoder.layers if (parts := mixture_of(layer)) is not None]
    assert found
    for parts in found:
        parts.bias.copy_(torch.tensor([0.0, 0.5, -0.5, 0.3]))
        parts.router.routed_scaling_factor = 1.75
        assert routing_of(parts).scale == 1.75
    fused, text = base.with_fused_pass(), torch.tensor([[5, 6, 7, 8, 9]])
    pool = fused.new_pool()
    hidden = fused.run(pool, fused.plan([(Draft.chain(text), [CachedSequence(pool)])]))
    torch.testing.assert_close(hidden, base.model.model(text).last_hidden_state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("replaced", [False, True])
@torch.inference_mode()
def test_biases_sinks_and_limits_of_gpt_oss_are_met(replaced):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("gpt_oss", swiglu_limit=0.5, swiglu_alpha=1.3)).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            weight.normal_()  # as they are made, biases are 0
    text = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]])
    theirs = model.model(text).last_hidden_state[0]
    if replaced:
        assert use_experts(model) == 3
    base = BaseModel(model, None, "gpt_oss")
    for one in (base, base.with_fused_pass()):
        pool = one.new_pool()
        hidden = one.run(pool, one.plan([(Draft.chain(text), [CachedSequence(pool)])]))
        torch.testing.assert_close(hidden, theirs, atol=1e-5, rtol=1e-5)


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
