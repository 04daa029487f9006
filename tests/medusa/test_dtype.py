"""In which dtype a base is loaded where none is asked for."""

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa import BaseModel, MedusaModel
from medusa.base import checkpoint
from medusa.base.checkpoint import choose_dtype
from medusa.cpu.native import available
from medusa.loading import dtype as loading_dtype
from medusa.loading.dtype import faster_dtype
from tests.medusa.test_conformance import FAMILIES, SHAPE, tiny

BF16, F16, SINGLE = torch.bfloat16, torch.float16, torch.float32
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_kernels = pytest.mark.skipif(not available(), reason="there is no C++ compiler here")


@pytest.mark.parametrize("stored", [BF16, F16, SINGLE, torch.float64, None])
@pytest.mark.parametrize(
    ("device", "pack", "kernels", "instructions", "expected"),
    [
        (CPU, True, True, False, {BF16: BF16, F16: F16}),
        (CPU, True, False, False, {BF16: SINGLE, F16: SINGLE}),
        (CPU, True, False, True, {BF16: BF16, F16: BF16}),
        (CPU, False, True, False, {BF16: SINGLE, F16: SINGLE}),
        (CPU, False, True, True, {BF16: BF16, F16: BF16}),
        (CUDA, True, True, False, {BF16: BF16, F16: F16}),
    ],
)
def test_the_choice(monkeypatch, stored, device, pack, kernels, instructions, expected):
    monkeypatch.setattr(checkpoint, "available", lambda: kernels)
    monkeypatch.setattr(checkpoint, "_cpu_has_bfloat16", lambda: instructions)
    assert choose_dtype(stored, device, pack) == expected.get(stored, stored or SINGLE)


@pytest.fixture
def stored(tmp_path, tokenizer, monkeypatch):
    """(family, dtype) -> the directory of a tiny base, on a CPU without bfloat16 instructions."""
    monkeypatch.setattr(checkpoint, "_cpu_has_bfloat16", lambda: False)

    def save(family, dtype):
        torch.manual_seed(0)
        sizes = SHAPE | FAMILIES[family] | {"vocab_size": len(tokenizer), "eos_token_id": 0, "initializer_range": 0.3}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        model.to(dtype).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


@needs_kernels
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_what_our_kernels_compute_stays_as_it_is_and_its_text_plain_decodings(stored, dtype, make_heads, caplog):
    with caplog.at_level(logging.INFO, "medusa"):
        base = MedusaModel.from_pretrained(None, base=stored("llama", dtype), device="cpu").base
    assert (base.dtype, base.fused, base.exact) == (dtype, True, True)
    assert [message for message in caplog.messages if message.startswith("dtype")] == [
        f"dtype {str(dtype)[6:]}: that of the checkpoint, since our kernels compute its pass"
    ]
    model, prompts = MedusaModel(base, make_heads().to(dtype)), [[5, 9, 40, 41], [7]]
    outputs = model.generate(prompts, max_new_tokens=60, nodes=8)
    assert [out.tokens for out in outputs] == [model.generate(p, max_new_tokens=60, nodes=1).tokens for p in prompts]
    assert sum(out.steps for out in outputs) < sum(len(out.tokens) for out in outputs), "some drafts were right"


@needs_kernels
@pytest.mark.parametrize(
    ("own", "times", "loaded"),
    [
        (BF16, {BF16: 2, SINGLE: 1}, SINGLE),
        (BF16, {BF16: 1.05, SINGLE: 1}, BF16),
        (F16, {F16: 1, SINGLE: 2, BF16: 2}, F16),
        (F16, {F16: 3, SINGLE: 2, BF16: 1}, BF16),
        (F16, {F16: 3, SINGLE: 1, BF16: 2}, SINGLE),
        (SINGLE, {}, SINGLE),
    ],
)
def test_what_torch_computes_is_loaded_in_what_is_faster(stored, own, times, loaded, monkeypatch, caplog):
    monkeypatch.setattr(loading_dtype, "alternate", lambda samples, _: {each: [times[each]] for each in samples})
    with caplog.at_level(logging.INFO, "medusa"):
        base = MedusaModel.from_pretrained(None, base=stored("arcee", own), device="cpu").base
    assert (base.dtype, base.fused) == (loaded, False)
    said = [message for message in caplog.messages if message.startswith("dtype")]
    assert len(said) == len(set(times) & {own})
    assert all(message.startswith(f"dtype {str(loaded)[6:]}: ") and " a layer takes " in message for message in said)


@needs_kernels
@pytest.mark.parametrize("own", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "falcon", "gemma2", "gpt2", "gpt_oss", "llama4_text", "mpt", "olmo2"]
)
def test_a_layer_of_any_family_can_be_timed(family, own, monkeypatch, caplog):
    monkeypatch.setattr(loading_dtype, "CACHES", 1)
    base = BaseModel(tiny(family)[0].model.to(own), None, family)
    before = {name: weight.clone() for name, weight in base.model.state_dict().items()}
    with caplog.at_level(logging.INFO, "medusa"):
        assert faster_dtype(base) in (own, *loading_dtype.OTHERS[own])
    assert " a layer takes " in caplog.text
    assert all(torch.equal(weight, before[name]) for name, weight in base.model.state_dict().items())


@needs_kernels
def test_a_layer_that_cannot_be_timed_changes_nothing(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no such rows")

    base = BaseModel(tiny("olmo2")[0].model.to(F16), None, "olmo2")
    monkeypatch.setattr(loading_dtype, "alternate", fail)
    with caplog.at_level(logging.INFO, "medusa"):
        assert faster_dtype(base) == F16
    assert "dtype float16: that of the checkpoint, since no layer could be timed: no such rows" in caplog.text
