"""What is exported comes back bit-equal, and other engines compute the same from it."""

import dataclasses

import pytest
import torch
from transformers import AutoTokenizer, PhiConfig, PhiForCausalLM

from medusa import BaseModel, HeadsConfig, MedusaModel, build_heads
from medusa.base.names import resolve_base
from medusa.formats import FORMATS, Export, export_heads, find_format, holders, load_heads, refusal
from tests.medusa.formats import engines
from tests.medusa.formats.stored import load_config

SHAPES = {
    "shared": {},
    "shared, two layers": {"num_layers": 2},
    "own": {"own_lm_heads": True},
    "own, two layers": {"own_lm_heads": True, "num_layers": 2},
    "draft vocabulary": {"draft_vocab_size": 20},
}
HELD = {
    "native": set(SHAPES),
    "medusa-v1": {"own", "own, two layers"},
    "medusa-v2": {"shared", "shared, two layers"},
    "tgi": {"shared", "own", "own, two layers"},
    "lorax": {"shared", "own", "own, two layers"},
    "vllm": set(SHAPES),
    "universal": {"shared", "own", "own, two layers"},
}
ACCEPTED = [(name, shape) for name in HELD for shape in SHAPES if shape in HELD[name]]
REFUSED = [(name, shape) for name in HELD for shape in SHAPES if shape not in HELD[name]]
READERS = {
    engines.read_by_original: ("medusa-v1", "medusa-v2"),
    engines.read_by_tgi: ("tgi", "universal"),
    engines.read_by_lorax: ("lorax", "universal"),
    engines.read_by_vllm: ("vllm", "universal"),
}


@pytest.fixture
def new_heads(make_heads):
    def new(shape, dtype=torch.float64):
        heads = make_heads(architecture="medusa", **SHAPES[shape]).to(dtype)
        if heads.draft_ids is not None:
            heads.draft_ids.mul_(3).add_(5)
        return heads

    return new


@pytest.fixture
def hidden(base):
    return torch.randn(5, base.hidden_size, dtype=base.dtype, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "shape"), ACCEPTED)
def test_round_trips_are_exact(base, new_heads, hidden, tmp_path, name, shape, dtype):
    heads = new_heads(shape, dtype)
    loaded = load_heads(export_heads(Export(heads, base), name, tmp_path / "heads"), dtype=None)
    state = loaded.state_dict()
    assert state.keys() == heads.state_dict().keys()
    for key, tensor in heads.state_dict().items():
        assert torch.equal(tensor, state[key])
        assert tensor.dtype == state[key].dtype
    assert dataclasses.replace(loaded.config, base="") == dataclasses.replace(heads.config, base="")
    assert load_config(tmp_path / "heads") == loaded.config
    with torch.no_grad():
        assert torch.equal(loaded.double().begin(hidden, base), new_heads(shape, dtype).double().begin(hidden, base))


@pytest.mark.parametrize(("name", "shape"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_with_what_can(base, new_heads, tmp_path, name, shape):
    heads = new_heads(shape)
    able = [other for other in FORMATS if shape in HELD.get(other, ())]
    assert [other for other in holders(heads.config) if other in HELD] == able
    with pytest.raises(
        ValueError, match=rf"^format '{name}' \w.*; formats that can hold these heads: native.*"
    ) as error:
        export_heads(Export(heads, base), name, tmp_path / "heads")
    assert set(str(error.value).rpartition(": ")[2].split(", ")) >= set(able)
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "hydra"}, "the architecture 'hydra'"),
        ({"feature_layers": (1,)}, "feature layers"),
        ({"base_adapter": "/some/adapter"}, "the adapter by which joint training"),
        ({"draft_vocab_size": 20, "own_lm_heads": True}, "a draft vocabulary"),
    ],
)
@pytest.mark.parametrize("name", [name for name in HELD if name != "native"])
def test_heads_of_other_kinds_are_refused_by_other_engines(base, new_heads, name, changes, reason):
    config = dataclasses.replace(new_heads("own").config, **changes)
    words = refusal(name, config)
    assert words.startswith(f"format {name!r} cannot hold")
    assert reason in words
    assert "native" in words
    assert not refusal("native", config)


@pytest.mark.parametrize(
    ("name", "read", "shape"),
    [
        (name, read, shape)
        for read, names in READERS.items()
        for name in names
        for shape in SHAPES
        if shape in HELD[name]
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@torch.no_grad()
def test_engines_compute_what_we_compute(base, new_heads, hidden, tmp_path, name, read, shape):
    heads = new_heads(shape)
    directory = export_heads(Export(heads, base), name, tmp_path / "heads")
    logits, expected = read(directory, hidden, base.lm_head_weight), heads.begin(hidden, base)
    if heads.draft_ids is not None:
        assert logits.isfinite().sum(-1).unique().tolist() == [20]
        logits = logits[..., heads.draft_ids]
    torch.testing.assert_close(logits, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["lorax", "universal"])
def test_lorax_takes_shared_heads_with_a_request_and_no_others(base, new_heads, hidden, tmp_path, name):
    shared = export_heads(Export(new_heads("shared"), base), name, tmp_path / "shared")
    engines.read_by_lorax(shared, hidden, base.lm_head_weight, dynamic=True)
    own = export_heads(Export(new_heads("own"), base), name, tmp_path / "own")
    with pytest.raises(ValueError, match="Dynamic"):
        engines.read_by_lorax(own, hidden, base.lm_head_weight, dynamic=True)


@pytest.mark.parametrize(("name", "shape"), [(name, next(s for s in SHAPES if s in HELD[name])) for name in HELD])
def test_every_format_decodes(base, new_heads, tmp_path, name, shape):
    directory = export_heads(Export(new_heads(shape), base), name, tmp_path / "heads")
    loaded = MedusaModel.from_pretrained(directory, dtype=torch.float64, device="cpu")
    direct = MedusaModel(base, new_heads(shape))
    outputs = [model.generate([5, 6, 7], max_new_tokens=12, nodes=8, drafter="heads") for model in (loaded, direct)]
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[0].steps == outputs[1].steps
    assert loaded.heads.config.vocab_size == base.vocab_size


def test_the_first_of_several_formats_counts(base, new_heads, tmp_path):
    found = {}
    for name in HELD:
        shape = "own" if name == "medusa-v1" else "shared"
        found[name] = find_format(export_heads(Export(new_heads(shape), base), name, tmp_path / name)).name
    assert found == {name: name for name in HELD} | {"tgi": "medusa-v2", "lorax": "medusa-v2"}


@pytest.mark.parametrize("name", ["vllm", "universal"])
def test_shared_heads_without_their_base_are_refused_where_it_is_shipped(new_heads, tmp_path, name):
    with pytest.raises(ValueError, match="ships the output layer of the base and no base is given; give the base too"):
        export_heads(Export(new_heads("shared")), name, tmp_path / "heads")


def test_an_output_layer_with_a_bias_is_refused_where_it_is_shipped(tokenizer, tmp_path):
    config = PhiConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    base = BaseModel(PhiForCausalLM(config), tokenizer, "phi")
    heads = build_heads(HeadsConfig(8, len(tokenizer), 2, base="phi"))
    with pytest.raises(ValueError, match=r"output layer of the base \(phi\) has a bias and format 'universal' cannot"):
        export_heads(Export(heads, base), "universal", tmp_path / "heads")


@pytest.mark.parametrize(("size", "message"), [("vocab_size", "vocabulary"), ("hidden_size", "hidden size")])
def test_another_base_is_refused(base, new_heads, tmp_path, size, message):
    heads = new_heads("shared")
    heads.config = dataclasses.replace(heads.config, **{size: 99})
    with pytest.raises(ValueError, match=rf"heads' {message} \(99\) is not the base's"):
        export_heads(Export(heads, base), "vllm", tmp_path / "heads")


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ("", ValueError, "heads name no base and other engines need one; give one"),
        ("../somewhere", FileNotFoundError, r"base directory \(\.\./somewhere\) does not exist"),
    ],
)
def test_the_base_at_hand_is_named_where_the_heads_name_none_that_exists(
    base, new_heads, tmp_path, named, error, message
):
    heads = new_heads("shared")
    heads.config = dataclasses.replace(heads.config, base=named)
    with pytest.raises(error, match=message):
        export_heads(Export(heads), "tgi", tmp_path / "heads")
    export_heads(Export(heads, base), "tgi", tmp_path / "heads")
    assert load_config(tmp_path / "heads").base == base.name


def test_a_base_on_the_hub_stays_that(base, new_heads, tmp_path):
    heads = new_heads("shared")
    heads.config = dataclasses.replace(heads.config, base="user/base")
    export_heads(Export(heads, base), "tgi", tmp_path / "heads")
    assert load_config(tmp_path / "heads").base == "user/base"


def test_a_directory_of_something_else_is_left_alone(base, base_directory, new_heads, tmp_path):
    for name in HELD:
        with pytest.raises(ValueError, match=r"holds a config\.json that is not .*; give a new directory"):
            export_heads(Export(new_heads("shared" if name != "medusa-v1" else "own"), base), name, base_directory)
    directory = export_heads(Export(new_heads("shared"), base), "universal", tmp_path / "heads")
    with pytest.raises(ValueError, match="is not 'vllm'"):
        export_heads(Export(new_heads("shared"), base), "vllm", directory)


def test_exporting_again_leaves_nothing_of_the_heads_before(base, new_heads, hidden, tmp_path):
    for shape in ("shared", "own", "shared"):
        export_heads(Export(new_heads(shape), base), "universal", tmp_path / "heads")
        assert load_config(tmp_path / "heads").own_lm_heads == (shape == "own")
        engines.read_by_vllm(tmp_path / "heads", hidden, base.lm_head_weight)


def test_an_unknown_format_names_the_known(new_heads, tmp_path):
    with pytest.raises(ValueError, match=r"format \('gguf'\) is not known; choose one of: native, .*universal"):
        export_heads(Export(new_heads("shared")), "gguf", tmp_path)


def test_who_may_read_new_files_may_read_weights(base, new_heads, tmp_path):
    directory = export_heads(Export(new_heads("shared"), base), "universal", tmp_path / "heads")
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1


@pytest.mark.parametrize(("before", "shape", "name"), [
    ("tgi", "own", "medusa-v1"), ("medusa-v2", "shared", "lorax"), ("vllm", "own", "vllm"),
])  # fmt: skip
def test_no_weights_of_replaced_heads_are_left(base, new_heads, tmp_path, before, shape, name):
    directory = export_heads(Export(new_heads(shape), base), before, tmp_path / "heads")
    for path in list(directory.glob("*.safetensors")) if name in ("lorax", "vllm") else []:
        path.rename(path.with_name("model-1-of-1.safetensors"))
    heads = new_heads(shape)
    heads.weight.neg_()
    export_heads(Export(heads, base), name, directory)
    assert torch.equal(load_heads(directory, torch.float64).weight, heads.weight)
    assert len([path for path in directory.iterdir() if path.suffix in (".pt", ".safetensors")]) == 1


def test_what_belongs_to_replaced_native_heads_goes(new_heads, tmp_path):
    directory = export_heads(Export(new_heads("shared"), provenance={"of": "others"}), "native", tmp_path / "heads")
    (directory / "adapter").mkdir()
    (directory / "adapter" / "adapter_config.json").write_text("{}")
    export_heads(Export(new_heads("shared")), "native", directory)
    assert {path.name for path in directory.iterdir()} == {"config.json", "heads.safetensors"}


def test_native_heads_find_their_base_from_a_linked_directory(base, new_heads, tmp_path):
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    export_heads(Export(new_heads("shared")), "native", tmp_path / "link" / "heads")
    named = load_config(tmp_path / "link" / "heads").base
    assert resolve_base(named, tmp_path / "link" / "heads") == resolve_base(base.name)


def test_a_tokenizer_of_several_chat_templates_is_shipped(base_directory, new_heads, tokenizer, tmp_path):
    base = BaseModel.load(base_directory, device="cpu")
    base.tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    directory = export_heads(Export(new_heads("shared"), base), "universal", tmp_path / "heads")
    shipped = AutoTokenizer.from_pretrained(directory)
    assert shipped.chat_template == base.tokenizer.chat_template
    assert shipped("ab c").input_ids == tokenizer("ab c").input_ids
