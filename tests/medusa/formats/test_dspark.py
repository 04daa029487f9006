"""DSpark drafts: ours come back saying the same, and those of others are read as the blocks that they are."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from medusa import HeadsConfig, MedusaModel, build_heads
from medusa.formats import Export, export_heads, find_format, load_heads, refusal
from medusa.heads.layer import LayerConfig
from medusa.io.hub import is_model
from tests.medusa.block_by_hand import recomputed
from tests.medusa.formats.stored import change_config, stored, trained
from tests.medusa.test_model_drafter import tiny

TEXT = [5, 6, 7, 9, 4, 4, 30, 21, 6]
PATH = [7, 12, 40]


@pytest.fixture(scope="module")
def base():
    """Of nine layers."""
    return tiny("llama", num_hidden_layers=9, dtype=torch.float32)


@pytest.fixture
def new_heads(base):
    def new(bias=False, **options):
        torch.manual_seed(1)
        layer = LayerConfig.of(base.config, norm_features=False, norm_heads=True, attention_bias=bias)
        shape = {"architecture": "block", "feature_layers": (2, 4, 6), "layer": layer, "mask_token": 3, "rank": 5}
        heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 4, num_layers=2, **shape | options))
        return trained(heads, base)

    return new


@torch.no_grad()
def said(base, heads, count=4):
    """Logits of each head behind a text, by hand and by the heads."""
    path = [*PATH, 5][: count - 1]
    by_hand = torch.stack([recomputed(heads, base, TEXT, path[:depth]) for depth in range(count)])
    if len(by_hand[0]) != heads.config.output_size:
        by_hand = by_hand[:, heads.draft_ids]
    hidden = base.tapped(heads.config.feature_layers).hidden_states(torch.tensor([TEXT[:-1]]))[0]
    path = torch.tensor([TEXT[-1], *path]).expand(len(hidden), -1)
    features = heads.forward(hidden, path, base)[:, -1]
    computed = torch.stack([heads.head_logits(head, features[head], base) for head in range(count)])
    torch.testing.assert_close(computed, by_hand, rtol=1e-4, atol=1e-4)
    return computed


@pytest.mark.parametrize("part", [{}, {"draft_vocab_size": 20, "own_lm_heads": True}], ids=["whole", "part"])
def test_round_trips_are_exact(base, new_heads, tmp_path, part):
    heads = new_heads(bias=True, own_correction=True, **part)
    if heads.gain is not None:
        heads.gain.fill_(1.0)
    export_heads(Export(heads, base), "dspark", tmp_path)
    loaded = load_heads(tmp_path)
    assert find_format(tmp_path).name == "dspark" and not is_model(tmp_path)
    assert dataclasses.replace(loaded.config, base="") == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


@pytest.mark.parametrize(
    "part", [{}, {"draft_vocab_size": 20}, {"draft_vocab_size": 20, "own_lm_heads": True}], ids=["whole", "part", "own"]
)
def test_corrections_become_matrices_of_their_own(base, new_heads, tmp_path, part):
    heads = new_heads(**part)
    export_heads(Export(heads, base), "dspark", tmp_path)
    tensors, config = stored(tmp_path)
    rows = part.get("draft_vocab_size", base.vocab_size)
    assert tensors["markov_head.markov_w1.weight"].shape == (base.vocab_size, 5)
    assert tensors["markov_head.markov_w2.weight"].shape == (rows, 5)
    assert ("lm_head.weight" in tensors) == ("d2t" in tensors) == bool(part)
    assert config["block_size"] == 4 and config["sample_from_anchor"] and config["mask_token_id"] == 3
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 6] and config["draft_vocab_size"] == rows
    loaded = load_heads(tmp_path)
    assert loaded.config.own_correction and loaded.config.own_lm_heads == bool(part)
    torch.testing.assert_close(said(base, loaded), said(base, heads), rtol=1e-4, atol=1e-4)


def test_drafts_of_others_draft_in_trees(base, new_heads, tmp_path):
    """Tokens in any order, the base's embeddings, a guess of acceptance."""
    heads = new_heads(draft_vocab_size=20, own_lm_heads=True)
    export_heads(Export(heads, base), "dspark", tmp_path)
    tensors, _ = stored(tmp_path)
    mixed = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(20) + tensors["d2t"])[mixed]
    output, after = (tensors[name][mixed].contiguous() for name in ("lm_head.weight", "markov_head.markov_w2.weight"))
    tensors |= {"d2t": ids - torch.arange(20), "lm_head.weight": output, "markov_head.markov_w2.weight": after}
    more = {"embed_tokens.weight": torch.zeros(50, 32), "confidence_head.proj.bias": torch.zeros(1)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    loaded = load_heads(tmp_path)
    torch.testing.assert_close(said(base, loaded), said(base, heads), rtol=1e-4, atol=1e-4)
    model = MedusaModel(base, loaded)
    plain = model.generate(TEXT, max_new_tokens=20, nodes=1)
    assert model.generate(TEXT, max_new_tokens=20, nodes=6, drafter="heads").tokens == plain.tokens
    model.save_pretrained(tmp_path / "native")
    assert load_heads(tmp_path / "native").state_dict().keys() == loaded.state_dict().keys()


def test_drafts_of_deepspec(base, new_heads, tmp_path):
    """One flat config, layers counted from 0, an output layer for the whole vocabulary."""
    heads = new_heads()
    export_heads(Export(heads, base), "dspark", tmp_path)
    tensors, config = stored(tmp_path)
    save_file(tensors | {"lm_head.weight": base.lm_head_weight}, tmp_path / "model.safetensors")
    flat = config["transformer_layer_config"] | {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 3, 5]}
    flat |= {key: config[key] for key in ("block_size", "mask_token_id", "markov_rank")}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    loaded = load_heads(tmp_path)
    assert loaded.config.feature_layers == (2, 4, 6) and loaded.config.own_lm_heads
    torch.testing.assert_close(said(base, loaded), said(base, heads), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask_token": None}, "holds blocks as DSpark has them"),
        ({"own_lm_heads": True}, "these heads have their own"),
        ({"feature_layers": ()}, "these read the last hidden state"),
        ({"architecture": "attention"}, "cannot hold heads of the architecture 'attention'"),
    ],
)
def test_what_it_cannot_hold_is_refused(new_heads, options, reason):
    assert reason in refusal("dspark", dataclasses.replace(new_heads().config, **options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_from_anchor": None}, "does not guess from its first row"),
        ({"markov_head_type": "gated"}, "another correction than one matrix behind a table"),
        ({"aux_hidden_state_layer_ids": [0, 4, 6]}, "the base's embeddings as a layer"),
        ({"target_hidden_size": 64}, "a hidden size of its own"),
        ({"block_size": None}, "num_heads .* must be a whole number"),
        ({"block_size": 10**9}, "guesses more than 1024 tokens ahead"),
        ({"speculators_config": None}, "is missing or wrong"),
        ({"draft_vocab_size": 20}, "its list of tokens .* is missing"),
    ],
)
def test_what_heads_cannot_be_is_refused(base, new_heads, tmp_path, changes, message):
    export_heads(Export(new_heads(), base), "dspark", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"DSpark draft .* cannot be loaded: .*{message}"):
        load_heads(tmp_path)


def test_bases_that_scale_are_refused(base, new_heads, tmp_path, monkeypatch):
    monkeypatch.setattr(type(base), "matrices", None)
    with pytest.raises(ValueError, match="scales or bounds its embeddings or logits"):
        export_heads(Export(new_heads(), base), "dspark", tmp_path)
