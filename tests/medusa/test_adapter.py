"""Heads that bring an adapter of their base (Medusa-2)."""

import dataclasses
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa import BaseModel, DraftHeads, MedusaModel
from medusa.base.adapter import apply_adapter
from medusa.formats import save_heads
from medusa.serve.model_options import describe

peft = pytest.importorskip("peft")
PROMPTS = [[1, 2, 3], [40, 41], list(range(60, 90))]


@pytest.fixture(scope="module")
def tuned(base_directory: Path) -> Any:
    """A second copy of the base with a random adapter that is not merged: what training ends with."""
    base = BaseModel.load(base_directory, dtype=torch.float64, device="cpu")
    torch.manual_seed(3)
    model = peft.get_peft_model(base.model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return base, model.eval()


@pytest.fixture(scope="module")
def directory(tuned: Any, make_heads: Callable[..., DraftHeads], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads with that adapter, moved after they were written."""
    root = tmp_path_factory.mktemp("tuned")
    tuned[1].save_pretrained(root / "peft")
    heads = make_heads()
    heads.config = dataclasses.replace(heads.config, base_adapter=str(root / "peft"))
    save_heads(heads, root / "first")
    shutil.rmtree(root / "peft")
    return (root / "first").rename(root / "heads")


def test_the_merged_base_is_the_base_with_its_adapter(tuned: Any, base: BaseModel, directory: Path) -> None:
    merged = BaseModel.load(base.name, torch.float32, "cpu", adapter=directory / "adapter")
    ids = torch.randint(1, 257, (2, 50), generator=torch.Generator().manual_seed(0))
    expected = tuned[0].hidden_states(ids)
    torch.testing.assert_close(merged.hidden_states(ids).double(), expected, rtol=0, atol=1e-5)
    assert (base.hidden_states(ids) - expected).abs().max() > 0.1
    assert not any("lora" in name for name, _ in merged.model.named_parameters())


def test_beside_rounded_weights_the_adapter_is_kept_as_it_is(tuned: Any, base: BaseModel, directory: Path) -> None:
    loaded = BaseModel.load(base.name, torch.float64, "cpu")
    beside = BaseModel(apply_adapter(loaded.model, directory / "adapter", merge=False), loaded.tokenizer)
    ids = torch.arange(1, 30)[None]
    torch.testing.assert_close(beside.hidden_states(ids), tuned[0].hidden_states(ids), rtol=0, atol=1e-6)
    assert any("lora" in name for name, _ in beside.model.named_parameters())
    assert not any(parameter.requires_grad for parameter in beside.model.parameters())


def test_decoding_is_lossless_towards_the_changed_base(
    tuned: Any, model: MedusaModel, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "medusa"):
        loaded = MedusaModel.from_pretrained(directory, dtype=torch.float64, device="cpu")
    assert sum("its answers are not those of the original" in line for line in caplog.messages) == 1
    changed = 0
    for prompt in PROMPTS:
        greedy = tuned[0].model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        expected = greedy[0, len(prompt) :].tolist()
        assert loaded.generate(prompt, max_new_tokens=24).tokens == expected
        assert loaded.generate(prompt, max_new_tokens=24, nodes=1).tokens == expected
        changed += model.generate(prompt, max_new_tokens=24).tokens != expected
    assert changed
    assert "TUNED" in describe(loaded, "heads")
    assert "TUNED" not in describe(model, "heads")


def test_saving_again_takes_the_adapter_along(directory: Path, tmp_path: Path) -> None:
    loaded = MedusaModel.from_pretrained(directory, device="cpu")
    copy = MedusaModel.from_pretrained(loaded.save_pretrained(tmp_path / "a" / "copy"), device="cpu")
    assert copy.base.adapter == str(tmp_path / "a" / "copy" / "adapter")
    assert copy.generate(PROMPTS[0], max_new_tokens=8).tokens == loaded.generate(PROMPTS[0], max_new_tokens=8).tokens
    loaded.save_pretrained(directory)  # over itself


@pytest.mark.parametrize("harm", ["other layers", "other sizes", "damaged", "missing"])
def test_an_adapter_that_does_not_fit_is_one_clear_error(
    harm: str, base: BaseModel, directory: Path, tmp_path: Path
) -> None:
    adapter = Path(shutil.copytree(directory / "adapter", tmp_path / "adapter"))
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    if harm == "other layers":
        tensors |= {name.replace("layers.1", "layers.2"): value.clone() for name, value in tensors.items()}
    if harm == "other sizes":
        tensors = {name: torch.zeros(value.shape[0], value.shape[1] + 1) for name, value in tensors.items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    if harm == "damaged":
        weights.write_bytes(weights.read_bytes()[:100])
    if harm == "missing":
        (adapter / "adapter_config.json").unlink()
    expected = FileNotFoundError if harm == "missing" else ValueError
    with pytest.raises(expected, match=r"adapter \(.*adapter\) (is of another|does not fit|does not exist)"):
        BaseModel.load(base.name, device="cpu", adapter=adapter)


def test_without_peft_the_error_says_what_to_install(
    base: BaseModel, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        BaseModel.load(base.name, device="cpu", adapter=directory / "adapter")
