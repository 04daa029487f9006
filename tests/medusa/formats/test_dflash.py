"""DFlash drafts: both ways of storing them are read as the blocks that they are."""

import json

import pytest
import torch
from safetensors.torch import save_file

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.engine.graph import StepGraphs
from medusa.formats import find_format, holders, load_heads, refusal
from medusa.formats.dspark import _names
from medusa.heads.layer import LayerConfig
from medusa.io.hub import is_model
from tests.medusa.formats.stored import change_config, trained
from tests.medusa.formats.test_dspark import said
from tests.medusa.remembering import TEXTS, Watched, recomputed, scores
from tests.medusa.tape import Recorder
from tests.medusa.test_graph import contents
from tests.medusa.test_model_drafter import tiny, words
from tests.medusa.trees import by_path


@pytest.fixture(scope="module")
def base():
    """Of nine layers."""
    return tiny("llama", num_hidden_layers=9)


@pytest.fixture(scope="module")
def heads(base):
    """Blocks of six rows, five of which guess."""
    torch.manual_seed(1)
    layer = LayerConfig.of(base.config, norm_features=False, norm_heads=True)
    shape = {"architecture": "block", "feature_layers": (2, 4, 6), "layer": layer, "mask_token": 3, "rank": 0}
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 5, num_layers=2, skip_root=True, **shape))
    heads = trained(heads, base).to(base.dtype)
    heads.gain.fill_(1.0)
    return heads


@pytest.fixture
def folder(base, heads, tmp_path):
    """As z-lab's: layers counted from 0, and embeddings and output layer are the base's."""
    state = heads.state_dict()
    save_file({theirs: state[ours] for ours, theirs in _names(heads.config)}, tmp_path / "model.safetensors")
    layer = heads.config.layer
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": base.hidden_size, "block_size": 6,
        "vocab_size": base.vocab_size, "num_hidden_layers": 2, "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads, "head_dim": layer.head_dim,
        "intermediate_size": layer.intermediate_size, "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope_parameters["rope_theta"], "max_position_embeddings": 128, "num_target_layers": 9,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 5]}, "auto_map": {"AutoModel": "dflash.Model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_both_ways_of_storing_it_are_read(base, heads, folder):
    loaded = load_heads(folder, base.dtype)
    assert find_format(folder).name == "dflash" and not is_model(folder)
    torch.testing.assert_close(said(base, loaded, 5), said(base, heads, 5), rtol=1e-6, atol=1e-6)
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("dflash_config")
    package = {
        "speculators_model_type": "dflash", "block_size": 6, "mask_token_id": 3, "draft_vocab_size": base.vocab_size,
        "aux_hidden_state_layer_ids": [index + 1 for index in own["target_layer_ids"]],
        "transformer_layer_config": config, "speculators_config": {"verifier": {"name_or_path": "some/base"}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(package))
    again = load_heads(folder, base.dtype)
    assert again.config.base == "some/base"
    torch.testing.assert_close(said(base, again, 5), said(base, heads, 5), rtol=1e-6, atol=1e-6)


def test_every_node_is_what_the_layers_say_of_the_text(base, folder):
    """Guesses do not depend on each other, so all nodes of a level have the same children."""
    model = MedusaModel(base, load_heads(folder, base.dtype))
    drafter = Watched(model.heads, model.base, 12, host_decides=False)
    outputs = model.generate(TEXTS, max_new_tokens=8, ignore_eos=True, drafter=drafter)
    assert max(draft.depth for _, draft, _ in drafter.seen) == 5 and len(drafter.seen) > 9
    for text, draft, row in drafter.seen[::6]:
        found = by_path(draft, row)
        assert found == pytest.approx(scores(model.heads, base, text, found), abs=1e-4)
    plain = model.generate(TEXTS, max_new_tokens=8, ignore_eos=True, nodes=1)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]


@pytest.mark.parametrize("attention", ["exact", "reference", "flash"])
def test_layers_with_windows_see_the_last_positions(heads, folder, attention):
    """A block of six rows, and a window of eight positions behind up to 120."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    change_config(folder, **windows)
    base = BaseModel(tiny("llama", num_hidden_layers=9, dtype=torch.float32).model, words(), "", attention)
    model = MedusaModel(base, load_heads(folder))
    assert model.heads.config.layer_windows == (8, 0)
    assert (model.heads.memory.fused is not None) == (attention == "exact")
    drafter = Watched(model.heads, model.base, 12, host_decides=False)
    model.generate(TEXTS, max_new_tokens=8, ignore_eos=True, drafter=drafter)
    for text, draft, row in drafter.seen[::6]:
        found = by_path(draft, row)
        assert found == pytest.approx(scores(model.heads, base, text, found), abs=1e-3)
    last = drafter.seen[2][0]
    assert len(last) > 30
    logits = [recomputed(one, base, last, []) for one in (model.heads, heads.float())]
    assert (logits[0] - logits[1]).abs().max() > 0.05, "the window matters"
    with pytest.raises(ValueError, match="not trained here"):
        model.heads(torch.zeros(2, 4 * 32), torch.zeros(2, 5, dtype=torch.int64), base)


def test_windows_that_are_switched_off_are_none(folder):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    change_config(folder, **layers, use_sliding_window=False)
    assert load_heads(folder).config.layer_windows == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_windows": [16]}, "for each of 2 layers"),
        ({"layer_windows": [16, -1]}, "for each of 2 layers"),
        ({"layer_windows": ["a", 0]}, "for each of 2 layers"),
        ({"skip_root": "yes"}, "must be true or false"),
        ({"assistant": [1]}, "must hold its sizes by name"),
    ],
)
def test_odd_values_in_our_own_format_are_refused(base, folder, tmp_path, changes, message):
    MedusaModel(base, load_heads(folder, base.dtype)).save_pretrained(tmp_path / "native")
    change_config(tmp_path / "native", **changes)
    with pytest.raises(ValueError, match=message):
        load_heads(tmp_path / "native")


def test_model_optimizer_and_the_package_say_windows_otherwise(folder):
    own = {"mask_token_id": 3, "target_layer_ids": [1, 3, 5]}
    change_config(folder, dflash_config=own | {"use_swa": True, "swa_window_size": 16, "causal": False})
    assert load_heads(folder).config.layer_windows == (16, 16)
    config = json.loads((folder / "config.json").read_text())
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
    package = {
        "speculators_model_type": "dflash", "block_size": 6, "mask_token_id": 3, "draft_vocab_size": 50,
        "aux_hidden_state_layer_ids": [2, 4, 6], "transformer_layer_config": config | layers,
        "speculators_config": {"verifier": {}}, "sliding_window_non_causal": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(package))
    assert load_heads(folder).config.layer_windows == (0, 9)
    change_config(folder, sliding_window_non_causal=False)
    with pytest.raises(ValueError, match="do not see later rows of a block"):
        load_heads(folder)


def test_a_recorded_step_is_the_eager_step(base, folder, monkeypatch):
    monkeypatch.setattr("medusa.cache.pool.RESERVED", 2048)
    recorded = MedusaModel(base, load_heads(folder, base.dtype), StepGraphs(base, recorder := Recorder()))
    eager, options = MedusaModel(base, load_heads(folder, base.dtype)), {"max_new_tokens": 24, "ignore_eos": True}
    drafter = Watched(recorded.heads, recorded.base, 12, host_decides=False)
    drafter.propose = super(Watched, drafter).propose  # a recorded step has no values to watch
    outputs = recorded.generate(TEXTS, drafter=drafter, **options)
    assert contents(outputs) == contents(eager.generate(TEXTS, drafter=drafter, **options))
    assert recorder.recorded >= 1 and recorder.replays > 9


def test_it_is_only_read(base, folder, tmp_path):
    model = MedusaModel(base, load_heads(folder, base.dtype))
    assert holders(model.heads.config) == ["native"]
    assert "is only read" in refusal("dflash", model.heads.config)
    assert "these are DFlash's" in refusal("dspark", model.heads.config)
    assert "as DFlash's" in refusal("custom-generate", model.heads.config)
    model.save_pretrained(tmp_path / "native")
    assert load_heads(tmp_path / "native").config == model.heads.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size .1. is not a number from 2"),
        ({"block_size": None}, "'block_size' is missing or wrong"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 5], "causal_head": True}}, "causal_head"),
        ({"dflash_config": {"mask_token_id": None, "target_layer_ids": [1, 3, 5]}}, "missing or wrong"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1, 3, 5]}}, "the base's embeddings as a layer"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": ["1", 3, 5]}}, "are not numbers of layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "of the kinds chunked_attention"),
        ({"target_hidden_size": 64}, "a hidden size of its own"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "its layer_types are not its layers'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}, "its window .5. is no number that holds"),
    ],
)
def test_what_heads_cannot_be_is_refused(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=rf"DFlash draft .* cannot be loaded: .*{message}"):
        load_heads(folder)
