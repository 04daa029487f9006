"""Decoding on a GPU: the text of plain decoding, whatever drafts, whichever attention backend, in whatever batch."""

import warnings

import pytest
import torch

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.acceptance import greedy
from medusa.attention import BACKENDS, BackendUnavailableError
from medusa.attention.contract import BlockTable, TreePlan
from medusa.drafters import HeadsDrafter
from medusa.engine.graph import StepGraphs
from medusa.engine.step import decode_step, verify
from medusa.heads import ARCHITECTURES
from medusa.heads.layer import LayerConfig
from medusa.loading.self_test import fuse
from tests.medusa.passes import prefill

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

DEVICE = "cuda"
TOKENS = 48


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(1, 256, (length,), generator=generator).tolist()


def load(directory, dtype, attention="auto", architecture="recurrent"):
    """The tiny base with three random heads."""
    try:
        base = BaseModel.load(directory, dtype=dtype, device=DEVICE, attention=attention)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    base = fuse(base)
    torch.manual_seed(1)
    layer = LayerConfig.of(base.config) if architecture in ("attention", "block") else None
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 3, architecture=architecture, layer=layer))
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return MedusaModel(base, heads)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_that_of_plain_decoding(base_directory, attention, architecture):
    model = load(base_directory, torch.float32, attention, architecture)
    for length in (1, 7, 60):
        plain = model.generate(prompt(length), max_new_tokens=TOKENS, nodes=1)
        for drafter in ("heads", "hybrid", "prompt-lookup"):
            drafted = model.generate(prompt(length), max_new_tokens=TOKENS, nodes=32, drafter=drafter)
            assert drafted.tokens == plain.tokens, (drafter, length)
            assert drafted.steps <= plain.steps


def test_the_usual_block_has_a_pass_of_its_own(base_directory):
    assert load(base_directory, torch.bfloat16, "triton").base.fused
    assert not load(base_directory, torch.bfloat16, "flash").base.fused


def test_the_gpu_writes_what_the_cpu_writes(base_directory):
    ours = load(base_directory, torch.float64, "reference")
    theirs = MedusaModel(BaseModel.load(base_directory, dtype=torch.float64, device="cpu"))
    options = {"max_new_tokens": TOKENS}
    assert ours.generate(prompt(9), **options).tokens == theirs.generate(prompt(9), **options).tokens


def test_sampled_text_depends_on_the_seed_alone(base_directory):
    model = load(base_directory, torch.float64, "reference")
    options = {"max_new_tokens": TOKENS, "temperature": 0.9, "top_p": 0.95, "seed": 5}
    plain = model.generate(prompt(9), nodes=1, **options)
    assert model.generate(prompt(9), **options).tokens == plain.tokens
    assert model.generate(prompt(9), **(options | {"seed": 6})).tokens != plain.tokens


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_ragged_batch_writes_what_each_prompt_writes_alone(base_directory, attention):
    model = load(base_directory, torch.float32, attention)
    prompts = [prompt(length) for length in (1, 40, 7)]
    batch = model.generate(prompts, max_new_tokens=TOKENS)
    assert [output.tokens for output in batch] == [
        model.generate(one, max_new_tokens=TOKENS, nodes=1).tokens for one in prompts
    ]


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes_to_the_end(base_directory, attention, dtype):
    model = load(base_directory, dtype, attention)
    outputs = model.generate([prompt(5), prompt(70)], max_new_tokens=TOKENS)
    for output in outputs:
        assert output.finish_reason == "eos" or len(output.tokens) == TOKENS
        assert output.tokens_per_step >= 1


def test_a_step_copies_to_the_host_once(base_directory):
    model = load(base_directory, torch.float32)
    drafter = HeadsDrafter(model.heads, model.base, 16)
    sequences, state = prefill(model.base, [prompt(4), prompt(9)])
    state = decode_step(model.base, sequences, drafter, greedy, state).state  # compiles and allocates
    bucket = StepGraphs(model.base).lend(sequences[0].pool, state, 128, (model.base, drafter, greedy), {})
    bucket.load(state, sequences, {})
    table = BlockTable(sequences[0].pool.tables.tensor()[bucket.lines], sequences[0].pool.size)
    torch.cuda.synchronize()
    try:
        with torch.inference_mode():
            torch.cuda.set_sync_debug_mode("error")
            draft = drafter.propose(state)
            plan = TreePlan([draft], state.positions, 128, table, model.base.attention, model.base.spans)
            verify(model.base, sequences[0].pool, plan, greedy, state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            decode_step(model.base, sequences, drafter, greedy, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) == 1
