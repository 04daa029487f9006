"""What a base takes of a device it is not on: by hand for one model, against real ones for several families."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa.budget.bound import CARDS, FREE, MULTIPLIES, READS, Card, free_nodes, step_work
from medusa.budget.plan import KEPT_FREE, Limits, graph_bytes, make_plan, pass_bytes
from medusa.budget.shape import read_shape
from tests.medusa.test_conformance import config_of

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "phi3": {},
    "mixtral": EXPERTS,
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    | {"topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
}
LIMITS = Limits(requests=64, nodes=64, prompt_tokens=512, block=32, reserve=128, buckets=9)


def config(family="llama", **options):
    return AutoConfig.for_model(**SMALL | FAMILIES[family] | {"model_type": family} | options)


@pytest.fixture(scope="module")
def llama_8b():
    return read_shape(AutoConfig.for_model(**LLAMA_8B), torch.bfloat16)


def test_llama_8b_by_hand(llama_8b):
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    layer = attention + 3 * 4096 * 14_336
    norms = (2 * 32 + 1) * 4096
    assert llama_8b.layer_weights == 32 * layer == 6_979_321_856
    assert llama_8b.output_weights == 128_256 * 4096
    assert llama_8b.other_weights == 128_256 * 4096 + norms
    assert llama_8b.weights == 8_030_261_248
    assert round(llama_8b.weight_bytes / 1e9, 2) == 16.06
    assert llama_8b.cached_bytes == 32 * 8 * (128 + 128) * 2 == 131_072


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_cache_are_those_of_the_real_model(family):
    shape = read_shape(config(family), torch.float32)
    model = AutoModelForCausalLM.from_config(config(family))
    assert shape.weights == sum(weight.numel() for weight in model.parameters())
    cache = model(torch.zeros(1, 3, dtype=torch.int64), use_cache=True).past_key_values
    assert 3 * shape.cached == sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.layer_weights + shape.output_weights <= shape.weights


def test_tied_ends_are_counted_once():
    tied, untied = (read_shape(config("qwen2", tie_word_embeddings=tied)) for tied in (True, False))
    assert untied.weights - tied.weights == 64 * 32
    assert tied.output_weights == untied.output_weights == 64 * 32


def test_a_row_visits_some_experts():
    shape = read_shape(config("mixtral"), torch.bfloat16)
    assert shape.expert_weights == 2 * 4 * 3 * 32 * 48
    dense = shape.layer_weights - shape.expert_weights + shape.output_weights
    one, many = step_work(shape, 1, 100), step_work(shape, 64, 100)
    assert one.linear == 2 * (dense + shape.expert_weights / 2)
    logits = 2 * shape.vocabulary
    assert one.weights == pytest.approx(2 * (dense + shape.expert_weights / 2) + logits)
    assert many.weights == pytest.approx(2 * (dense + shape.expert_weights) + 64 * logits)


@pytest.mark.parametrize(
    ("quantised", "bits"), [({"bits": 4, "quant_method": "gptq"}, 4), ({"load_in_8bit": True}, 8), (None, 16)]
)
def test_quantised_layers_take_their_bits(quantised, bits):
    shape = read_shape(config(quantization_config=quantised) if quantised else config(), torch.bfloat16)
    assert shape.bits == bits
    plain = 2 * (shape.output_weights + shape.other_weights)
    assert shape.weight_bytes == shape.layer_weights * bits // 8 + plain
    assert read_shape(config(), torch.bfloat16, int8=True).bits == 8


def test_int8_leaves_experts_of_an_odd_kind_as_they_are():
    families = ("qwen3_moe", "gpt_oss", "llama4_text")
    *usual, odd = (read_shape(config_of(family), torch.bfloat16, int8=True) for family in families)
    plain = read_shape(config_of("llama4_text"), torch.bfloat16)
    assert [one.held for one in usual] == [0, 0]
    saved = plain.layer_weights - plain.expert_weights
    assert odd.weight_bytes == pytest.approx(plain.weight_bytes - saved, rel=0.01)


def test_packed_experts_are_read_as_far_as_they_are_visited():
    shape = read_shape(config("mixtral"), torch.bfloat16)
    held = replace(shape, held=(shape.layer_weights + shape.output_weights) * shape.itemsize)
    assert step_work(held, 2, 100).weights == pytest.approx(step_work(shape, 2, 100).weights)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: AutoConfig.for_model("mamba", num_hidden_layers=1, hidden_size=32, vocab_size=64), "keys and values"),
        (lambda: config(quantization_config={"quant_method": "odd"}), r"quantisation \(odd\)"),
    ],
)
def test_what_cannot_be_planned_says_so(bad, reason):
    with pytest.raises(ValueError, match=reason):
        read_shape(bad())


def test_the_parts_of_a_plan_are_the_whole(llama_8b):
    plan = make_plan(llama_8b, LIMITS, 80 * 10**9)
    taken = llama_8b.weight_bytes + pass_bytes(llama_8b, LIMITS) + graph_bytes(llama_8b, LIMITS) + KEPT_FREE * 80e9
    assert taken + plan.cache == 80e9
    assert plan.block_bytes == 32 * 131_072
    assert plan.positions == 32 * (plan.cache // (32 * 131_072) - 1), "a block is nobody's"
    assert plan.fitting(2048) == plan.blocks // ((2048 + 128) // 32)
    assert plan.fitting(131_072) == 2


def test_logits_of_all_trees_are_most_of_the_largest_pass(llama_8b):
    logits = 64 * 64 * 128_256 * (2 + 3 * 4)
    hidden = 4096 * (2 * 2 + 2 * 4) + 2 * 3 * 14_336
    assert pass_bytes(llama_8b, LIMITS) == logits + 64 * 64 * hidden
    eager = replace(LIMITS, buckets=0)
    assert pass_bytes(llama_8b, eager) == logits + (64 * 64 + 512) * hidden, "prompts are computed beside the trees"


def test_steps_are_recorded_for_powers_of_two_and_kept_in_buckets(llama_8b):
    tokens = 131_072 + 128
    kept = graph_bytes(llama_8b, LIMITS) - pass_bytes(llama_8b, LIMITS, 64 * 64)
    assert kept == 9 * (64 * tokens * 8 + 2**25)
    limits = replace(LIMITS, requests=33)
    assert graph_bytes(llama_8b, limits) == graph_bytes(llama_8b, LIMITS)
    assert graph_bytes(llama_8b, replace(LIMITS, buckets=0)) == 0


def test_a_cache_of_a_given_size(llama_8b):
    plan = make_plan(llama_8b, LIMITS, 80 * 10**9, cache=3200)
    assert (plan.blocks, plan.cache) == (100, 101 * 32 * 131_072)
    with pytest.raises(ValueError, match=r"too little for 1,000,000 positions"):
        make_plan(llama_8b, LIMITS, 80 * 10**9, cache=1_000_000)


def test_what_does_not_fit_says_what_to_do(llama_8b):
    with pytest.raises(
        ValueError, match=r"weights \(16\.06 GB\) of llama .* fewer bits .* spread the base over at least 3"
    ):
        make_plan(llama_8b, LIMITS, 8 * 10**9)
    with pytest.raises(ValueError, match=r"leave 0\.0 MB of 22\.80 GB, .* fewer than 64 requests"):
        make_plan(llama_8b, LIMITS, 24 * 10**9)


def test_a_plan_is_a_short_table(llama_8b):
    text = make_plan(llama_8b, LIMITS, 80 * 10**9).table()
    assert "8.03 billion weights on 80.00 GB" in text
    assert "16.06 GB" in text
    assert "131,072 bytes" in text
    assert "2 of 131,072" in text
    assert "65,536" not in make_plan(read_shape(config()), LIMITS, 10**9).table(), "its context is 128 tokens"


def test_a_plain_step_by_hand(llama_8b):
    work = step_work(llama_8b, 16, 8192)
    multiplied = 6_979_321_856 + 128_256 * 4096
    assert work.weights == 2 * multiplied + 16 * 128_256 * 2
    assert work.cached == 16 * 8193 * 131_072
    assert work.flops == 2 * 16 * multiplied + 16 * 8193 * 4 * 32 * 4096
    card = Card("", "", 0, 2e12, 400e12)
    assert work.milliseconds(card) == pytest.approx(1e3 * work.bytes / (READS * 2e12)), "reading takes the time"


def test_with_many_rows_multiplying_takes_the_time(llama_8b):
    work = step_work(llama_8b, 64, 2048, 64)
    card = CARDS[0]
    assert work.milliseconds(card) == pytest.approx(1e3 * work.flops / (MULTIPLIES * card.products))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_free_nodes_are_the_last_within_the_limit(llama_8b, card):
    free = free_nodes(llama_8b, card, 16, 2048)
    plain, last, next_one = (step_work(llama_8b, 16, 2048, n).milliseconds(card) for n in (1, free, free + 1))
    assert last <= FREE * plain < next_one
    assert free_nodes(llama_8b, card, 1, 2048) > free > free_nodes(llama_8b, card, 64, 2048)
    assert not math.isinf(free)


def test_planning_needs_no_torch():
    script = "import sys, medusa.budget.bound, medusa.budget.plan; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
