"""EAGLE-3 drafts: ours come back as they were, and those of others are read as the layer that they are."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from medusa import HeadsConfig, MedusaModel, build_heads
from medusa.formats import Export, export_heads, find_format, load_heads, refusal
from medusa.heads.layer import LayerConfig
from medusa.io.hub import is_model
from tests.medusa.formats.stored import change_config, stored, trained
from tests.medusa.test_model_drafter import tiny

KINDS = {
    "3": {"norm_features": False, "norm_output": False},
    "3.1": {},
    "joint": {"norm_jointly": True, "norm_output": False},
    "qwen3": {"norm_features": False, "norm_heads": True, "norm_before_residual": True, "attention_bias": True},
    "window": {"window": 6},
    "qwen3, window": {"norm_features": False, "norm_heads": True, "window": 6},
}
FORMS = ("eagle3", "speculators")
TEXT = torch.tensor([5, 6, 7, 9, 4, 4, 30, 21, 6, 7, 12, 40])


@pytest.fixture(scope="module")
def base():
    """Of nine layers."""
    return tiny("llama", num_hidden_layers=9, dtype=torch.float32)


@pytest.fixture
def new_heads(base):
    def new(kind="3", **options):
        torch.manual_seed(1)
        layer = LayerConfig.of(base.config, **KINDS[kind])
        shape = {"architecture": "attention", "feature_layers": (2, 4, 6), "layer": layer, "own_lm_heads": True}
        heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, 4, **shape | options))
        return trained(heads, base)

    return new


@torch.no_grad()
def said(base, heads):
    """Logits along a text: of each head behind each of its first tokens."""
    hidden = base.tapped(heads.config.layers_of(base.num_layers)).hidden_states(TEXT[None])[0]
    path = torch.stack([TEXT[1 + ahead : 9 + ahead] for ahead in range(4)], dim=1)
    features = heads.forward(hidden[:8], path, base)
    return torch.stack([heads.head_logits(head, features[head], base) for head in range(4)])


@pytest.mark.parametrize("part", [0, 20], ids=["whole", "part"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_round_trips_are_exact(base, new_heads, tmp_path, form, kind, part):
    heads = new_heads(kind, draft_vocab_size=part)
    export_heads(Export(heads, base), form, tmp_path)
    loaded = load_heads(tmp_path)
    assert find_format(tmp_path).name == form and not is_model(tmp_path)
    assert dataclasses.replace(loaded.config, base="") == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


@pytest.mark.parametrize("part", [0, 20], ids=["whole", "part"])
@pytest.mark.parametrize("form", FORMS)
def test_the_base_s_output_layer_travels_along(base, new_heads, tmp_path, form, part):
    heads = new_heads("3.1", own_lm_heads=False, draft_vocab_size=part)
    export_heads(Export(heads, base), form, tmp_path)
    tensors, config = stored(tmp_path)
    ids = torch.arange(base.vocab_size)
    if part:
        ids = torch.arange(part) + tensors["d2t"]
        assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert torch.equal(tensors["lm_head.weight"], base.lm_head_weight[ids] * heads.gain)
    assert config["draft_vocab_size"] == len(ids)
    assert ("d2t" in tensors) == bool(part)
    torch.testing.assert_close(said(base, load_heads(tmp_path)), said(base, heads))


def test_the_base_s_factor_on_logits_travels_along(base, new_heads, tmp_path, monkeypatch):
    monkeypatch.setattr(base.output, "scale", 0.125)
    heads = new_heads("3.1", own_lm_heads=False)
    export_heads(Export(heads, base), "eagle3", tmp_path)
    torch.testing.assert_close(said(base, load_heads(tmp_path)), said(base, heads))


@pytest.mark.parametrize("values", [{"num_attention_heads": 3}, {"hidden_size": 31}, {"vocab_size": "x"}])
def test_a_config_that_transformers_refuses_is_one_sentence(base, new_heads, tmp_path, values):
    export_heads(Export(new_heads(), base), "eagle3", tmp_path)
    change_config(tmp_path, **values)
    with pytest.raises(ValueError, match=r"cannot be loaded: .*; give another draft, or copy it again") as error:
        load_heads(tmp_path)
    assert "\n" not in str(error.value)


def test_missing_weights_are_named_as_they_were_written(base, new_heads, tmp_path):
    export_heads(Export(new_heads(), base), "eagle3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_heads(tmp_path)


def test_layers_are_told_to_each_reader_in_its_own_way(base, new_heads, tmp_path):
    key = "eagle_aux_hidden_state_layer_ids"
    export_heads(Export(new_heads(feature_layers=(1, 4, 7)), base), "eagle3", tmp_path)
    config = stored(tmp_path)[1]
    assert config[key] == [1, 4, 7] and config["eagle_config"][key] == [0, 3, 6]
    assert load_heads(tmp_path).config.feature_layers == (1, 4, 7)
    change_config(tmp_path, **{key: None})
    assert load_heads(tmp_path).config.feature_layers == (1, 4, 7)
    change_config(tmp_path, eagle_config=None)
    loaded = load_heads(tmp_path)
    model = MedusaModel(base, loaded)
    assert model.heads.config.feature_layers == model.base.feature_layers == (2, 4, 6)
    plain = model.generate(TEXT.tolist(), max_new_tokens=20, nodes=1)
    assert model.generate(TEXT.tolist(), max_new_tokens=20, nodes=6, drafter="heads").tokens == plain.tokens
    export_heads(Export(loaded, base), "speculators", tmp_path / "again")
    assert stored(tmp_path / "again")[1][key] == [2, 4, 6]


def test_names_and_shapes_are_those_that_sglang_reads(base, new_heads, tmp_path):
    """It passes over tensors that it does not know, in silence: there must be none, and none may be missing."""
    export_heads(Export(new_heads(draft_vocab_size=20), base), "eagle3", tmp_path)
    tensors, config = stored(tmp_path)
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    dim, inner = config["hidden_size"], config["intermediate_size"]
    layer = {
        "input_layernorm": (dim,), "hidden_norm": (dim,), "post_attention_layernorm": (dim,),
        "self_attn.q_proj": (queries, 2 * dim), "self_attn.k_proj": (keys, 2 * dim),
        "self_attn.v_proj": (keys, 2 * dim), "self_attn.o_proj": (dim, queries),
        "mlp.gate_proj": (inner, dim), "mlp.up_proj": (inner, dim), "mlp.down_proj": (dim, inner),
    }  # fmt: skip
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    expected |= {"fc.weight": (dim, 3 * dim), "norm.weight": (dim,), "lm_head.weight": (20, dim)}
    expected |= {"d2t": (20,), "t2d": (base.vocab_size,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], 1)
    assert (config["draft_vocab_size"], config["tie_word_embeddings"]) == (20, False)
    assert not config["norm_before_residual"] and config["rope_theta"]


def test_drafts_reach_as_far_as_the_base(base, new_heads, tmp_path):
    heads = new_heads()
    heads = heads.with_config(layer=dataclasses.replace(heads.config.layer, max_position_embeddings=7))
    export_heads(Export(heads, base), "eagle3", tmp_path)
    assert stored(tmp_path)[1]["max_position_embeddings"] == base.context_length > 7


def test_drafts_of_others(base, new_heads, tmp_path):
    """Tokens in any order, an embedding, the older names of rotary positions and of the model, a pickle."""
    heads = new_heads(draft_vocab_size=20)
    export_heads(Export(heads, base), "eagle3", tmp_path)
    tensors, config = stored(tmp_path)
    mixed = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(20) + tensors["d2t"])[mixed]
    tensors |= {"d2t": ids - torch.arange(20), "lm_head.weight": tensors["lm_head.weight"][mixed].contiguous()}
    torch.save(tensors | {"embed_tokens.weight": torch.zeros(50, 32)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    for name in ("rope_parameters", "head_dim", "num_speculative_tokens", "fc_norm", "norm_before_residual"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    loaded = load_heads(tmp_path)
    assert loaded.config.num_heads == 5
    assert torch.equal(said(base, loaded), said(base, heads))


def test_a_draft_without_an_output_layer_has_the_base_s(base, new_heads, tmp_path):
    heads = new_heads(own_lm_heads=False)
    heads.gain.fill_(1.0)
    export_heads(Export(heads, base), "eagle3", tmp_path)
    tensors, _ = stored(tmp_path)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_heads(tmp_path)
    assert not loaded.config.own_lm_heads
    assert torch.equal(said(base, loaded), said(base, heads))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"feature_layers": ()}, "these read the last hidden state"),
        ({"feature_layers": (4, 2, 6)}, "in rising order only, and these heads read them in another"),
        ({"architecture": "recurrent"}, "cannot hold heads of the architecture 'recurrent'"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_they_cannot_hold_is_refused(new_heads, form, options, reason):
    config = dataclasses.replace(new_heads().config, **options)
    assert reason in refusal(form, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "it has 2 layers"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"mlp_bias": True}, "biases in its MLP"),
        ({"target_hidden_size": 64}, "a hidden size of its own"),
        ({"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, "a sliding window in some"),
        ({"model_type": "gemma"}, "of the kind 'gemma'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, r"positions .* \(dynamic\)"),
        ({"fc_norm": True}, "'fc_norm.0.weight' is missing"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "does not read 2 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "the base's embeddings as a layer"),
    ],
)
def test_what_heads_cannot_be_is_refused(base, new_heads, tmp_path, changes, message):
    export_heads(Export(new_heads(), base), "eagle3", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"EAGLE-3 draft .* cannot be loaded: .*{message}"):
        load_heads(tmp_path)


def test_tensors_that_nobody_spoke_of_are_refused(base, new_heads, tmp_path):
    export_heads(Export(new_heads("qwen3"), base), "eagle3", tmp_path)
    change_config(tmp_path, attention_bias=False)
    with pytest.raises(ValueError, match=r"it holds layers.0.self_attn.k_proj.bias, .* which its config does not"):
        load_heads(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_requires_grad": True}, "its embeddings were trained"),
        ({"norm_before_residual": None}, "does not set norm_before_residual"),
        ({"speculators_config": None}, "is missing or wrong"),
    ],
)
def test_speculators_configs_that_cannot_be_followed(base, new_heads, tmp_path, changes, message):
    export_heads(Export(new_heads(), base), "speculators", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_heads(tmp_path)
