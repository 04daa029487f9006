"""Drafts between here and the speculators package: one reads what the other writes, and both say the same."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa import BaseModel, DraftHeads, HeadsConfig, MedusaModel, build_heads
from medusa.formats import Export, export_heads, load_heads
from medusa.heads.layer import LayerConfig
from tests.engines.environment import UnavailableError, python_with
from tests.medusa.formats.stored import trained
from tests.medusa.test_model_drafter import tiny
from tests.train.jobs import ROOT

pytestmark = pytest.mark.slow

STEPS = 3
EXPORTS: dict[str, dict[str, Any]] = {
    "eagle-3": {"norm_features": False, "norm_output": False},
    "eagle-3.1": {"draft_vocab_size": 20},
    "shared": {"own_lm_heads": False, "feature_layers": (1, 3, 5, 8), "draft_vocab_size": 20},
    "joint": {"norm_jointly": True},
    "dspark": {"architecture": "block", "draft_vocab_size": 20},
    "dspark-shared": {"architecture": "block", "own_lm_heads": False, "attention_bias": True},
}
QWEN = {"kind": "qwen3", "norm_before_residual": True}
LONG = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
DSPARK = {
    "algorithm": "dspark", "kind": "qwen3", "block_size": STEPS, "mask_token_id": 4,
    "aux_hidden_state_layer_ids": [1, 4, 7],
}  # fmt: skip
MADE: dict[str, dict[str, Any]] = {
    "default": {"kind": "llama", "vocabulary": 20},
    "theirs": QWEN | {"vocabulary": 20, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
    "theirs-3.1": QWEN | {"vocabulary": 50, "fc_norm": True, "norm_output": True, "layer": {"attention_bias": True}},
    "gpt-oss": {
        "kind": "llama", "vocabulary": 50, "norm_before_fc": True,
        "layer": {"rope_parameters": LONG | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    },
    "their-dspark": DSPARK | {"vocabulary": 20},
    "their-dflash": DSPARK | {"algorithm": "dflash", "vocabulary": 20, "block_size": STEPS + 1},
    "their-whole-dflash": DSPARK
    | {"algorithm": "dflash", "vocabulary": 50, "block_size": STEPS + 1, "layer": {"num_hidden_layers": 3}},
    "their-whole-dspark": DSPARK | {"vocabulary": 50, "layer": {"num_hidden_layers": 3}, "markov_rank": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return python_with("speculators")
    except UnavailableError as reason:
        pytest.skip(f"speculators cannot be installed here: {reason}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculators")


@pytest.fixture(scope="module")
def base(directory: Path) -> BaseModel:
    made = tiny("llama", num_hidden_layers=9, dtype=torch.float32)
    made.model.save_pretrained(directory / "base")
    made.name = str(directory / "base")
    return made


@pytest.fixture(scope="module")
def text(base: BaseModel) -> torch.Tensor:
    return torch.randint(base.vocab_size, (40,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def theirs(python: Path, base: BaseModel, text: torch.Tensor, directory: Path) -> dict[str, torch.Tensor]:
    """What the package says of our exports, and of drafts of its own."""
    for name, options in EXPORTS.items():
        heads = new_heads(base, **options)
        form = "dspark" if heads.config.architecture == "block" else "speculators"
        export_heads(Export(heads, base), form, directory / name)
    made = {name: options | {"directory": str(directory / name)} for name, options in MADE.items()}
    exports = {name: str(directory / name) for name in EXPORTS}
    job, tensors, result = (directory / name for name in ("job.json", "in.safetensors", "out.safetensors"))
    values = {"base": base.name, "steps": STEPS, "exports": exports, "made": made}
    job.write_text(json.dumps(values), encoding="utf-8")
    layers = tuple(range(1, base.num_layers))
    hidden = base.tapped(layers).hidden_states(text[None])[0]
    by_layer = hidden.unflatten(-1, (-1, base.hidden_size)).transpose(0, 1)[1:].contiguous()
    save_file({"ids": text, "hidden": by_layer}, tensors)
    command = [python, "-I", ROOT / "tests/engines/speculators_check.py", job, tensors, result]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return load_file(result)


@pytest.mark.parametrize("name", [*EXPORTS, *MADE])
@torch.no_grad()
def test_both_say_the_same_along_a_text(
    theirs: dict[str, torch.Tensor], base: BaseModel, text: torch.Tensor, directory: Path, name: str
) -> None:
    heads = new_heads(base, **EXPORTS[name]) if name in EXPORTS else load_heads(directory / name)
    heads = MedusaModel(base, heads).heads
    hidden = base.tapped(heads.config.feature_layers).hidden_states(text[None])[0]
    places = min(len(text) - STEPS, theirs[name].shape[1])
    path = torch.stack([text[1 + ahead : 1 + ahead + places] for ahead in range(STEPS)], dim=1)
    features = heads.forward(hidden[:places], path, base)
    ours = torch.stack([heads.head_logits(head, features[head], base) for head in range(STEPS)])
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs[name][:, :places], rtol=1e-4, atol=1e-4)


def new_heads(base: BaseModel, **options: Any) -> DraftHeads:
    """Random heads, the same for the same options."""
    torch.manual_seed(1)
    shape = {"own_lm_heads": True, "feature_layers": (2, 4, 6), "draft_vocab_size": 0}
    shape |= {"architecture": "attention", "mask_token": None}
    shape |= {name: options.pop(name) for name in shape if name in options}
    if shape["architecture"] == "block":
        shape |= {"mask_token": 4, "num_layers": 2, "rank": 6}
        options |= {"norm_features": False, "norm_heads": True}
    layer = LayerConfig.of(base.config, **options)
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, STEPS, layer=layer, **shape))
    return trained(heads, base)
