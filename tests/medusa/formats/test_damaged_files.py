"""Files that are damaged, or dangerous, are one clear sentence."""

import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa import MedusaModel
from medusa.formats import load_heads, save_heads
from tests.medusa.formats.engines import original_heads, write_original, write_vllm
from tests.medusa.formats.stored import change_config, load_config

DIM, VOCAB = 4, 6


def refused(directory, message, reads=(load_heads,)):
    """Heads are refused, in one sentence."""
    for read in reads:
        with pytest.raises(ValueError, match=message) as error:
            read(directory)
        assert "\n" not in str(error.value)
        assert "weights_only" not in str(error.value), "no advice to load what is not safe"


def write(directory, name):
    return write_original(directory, original_heads(3, 1, DIM, VOCAB).state_dict(), name) / name


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "heads.safetensors"])
def test_truncated_files(make_heads, tmp_path, name):
    native = name == "heads.safetensors"
    path = save_heads(make_heads(), tmp_path) / name if native else write(tmp_path, name)
    whole = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 60, *range(100, min(len(whole), 4000) - 1, 251), len(whole) - 1}:
        path.write_bytes(whole[:length])
        refused(tmp_path, rf"heads file \(.*{name}\) is damaged: ", (load_heads, *([] if native else [load_config])))


def test_files_of_torch_before_1_6_are_read(tmp_path):
    heads = original_heads(3, 1, DIM, VOCAB)
    write_original(tmp_path, heads.state_dict(), "medusa_lm_head.pt")
    new = load_heads(tmp_path).state_dict()
    torch.save(heads.state_dict(), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    old = load_heads(tmp_path).state_dict()
    assert all(torch.equal(old[name], tensor) for name, tensor in new.items())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_changed_bytes_give_heads_or_one_sentence(tmp_path, name):
    path = write(tmp_path, name)
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(min(len(whole), 1500))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            load_heads(tmp_path)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert refused > 20


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    path, mark = write(tmp_path, "medusa_lm_head.pt"), tmp_path / "mark"
    torch.save(original_heads(3, 1, DIM, VOCAB).state_dict() | {"bomb": Bomb(mark)}, path)
    refused(tmp_path, "pickle of more than tensors and could run code: it is not load", (load_config, load_heads))
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the bomb works where it is loaded"


@pytest.mark.parametrize(
    ("way", "message"),
    [("pickle", "is damaged: torch"), ("torch before 1.6", "pickle of more than tensors and could run code")],
)
def test_other_pickles_are_not_run_either(tmp_path, way, message):
    path, mark = write(tmp_path, "medusa_lm_head.pt"), tmp_path / "mark"
    with path.open("wb") as file:
        if way == "pickle":
            pickle.dump(Bomb(mark), file)
        else:
            torch.save(Bomb(mark), file, _use_new_zipfile_serialization=False)
    refused(tmp_path, message)
    assert not mark.exists()


@pytest.mark.parametrize("value", [[torch.zeros(1)], {"0.0.linear.weight": 3}, {0: torch.zeros(1)}, None])
def test_a_pickle_of_something_else(tmp_path, value):
    torch.save(value, write(tmp_path, "medusa_lm_head.pt"))
    refused(tmp_path, "does not hold tensors by name")


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def having(name, *shape, dtype=torch.float32):
    return lambda held: held | {name: torch.zeros(shape, dtype=dtype)}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (without("1.0.linear.weight"), "tensors of some layers or heads are missing"),
        (without("0.0.linear.weight", "1.0.linear.weight", "2.0.linear.weight"), "layers or heads are missing"),
        (lambda tensors: {}, "layers or heads are missing"),
        (without("1.1.weight"), "some heads have an output layer and some have none"),
        (having("1.0.linear.weight", DIM, DIM + 1), "not square matrices of one size"),
        (having("1.0.linear.weight"), "not square matrices of one size"),
        (having("0.0.linear.weight"), "not square matrices of one size"),
        (having("1.0.linear.bias", DIM + 1), "biases do not fit the weights"),
        (having("1.1.weight", VOCAB + 1, DIM), "output layers do not fit the weights"),
        (having("1.1.weight", DIM), "output layers do not fit the weights"),
        (having("1.0.linear.weight", DIM, DIM, dtype=torch.int32), "weights are not floating point numbers"),
        (having("model.norm.weight", DIM), r"not one of Medusa heads \('model\.norm\.weight'\)"),
        (having("99999.0.linear.weight", DIM, DIM), "not one of Medusa heads"),
        (having("5.0.linear.weight", DIM, DIM), "layers or heads are missing"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, harm, message):
    state = original_heads(3, 1, DIM, VOCAB).state_dict()
    write_original(tmp_path, harm(state), "medusa_lm_head.safetensors")
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        (torch.tensor([1.0, 2.0]), "not a list of token ids"),
        (torch.tensor([[1, 2]]), "not a list of token ids"),
        (torch.tensor([], dtype=torch.int64), "not a list of token ids"),
        (torch.tensor([1, VOCAB]), "token_map does not fit the output layer"),
        (torch.tensor([-1, 1]), "token_map does not fit the output layer"),
        (torch.tensor([2, 2]), "draft_ids are not ascending token ids"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_token_maps_that_do_not_fit(tmp_path, token_map, message, own):
    tensors = {f"blocks.{head}.layers.0.weight": torch.zeros(DIM, DIM) for head in range(2)}
    names = ["lm_heads.0.weight", "lm_heads.1.weight"] if own else ["lm_head.weight"]
    tensors |= {name: torch.zeros(VOCAB, DIM) for name in names} | {"token_map": token_map}
    write_vllm(tmp_path, tensors, num_heads=2, num_hidden_layers=1, vocab_size=VOCAB, original_lm_head=not own)
    refused(tmp_path, message)


@pytest.mark.parametrize("values", ["{", "[]", "3", '"x"', "\udcff", "[" * 100_000])
def test_damaged_configs(tmp_path, values):
    write(tmp_path, "medusa_lm_head.pt")
    (tmp_path / "config.json").write_bytes(values.encode(errors="surrogateescape"))
    refused(tmp_path, r"heads config \(.*config\.json\) is not (valid JSON|a JSON object)")


@pytest.mark.parametrize("key", ["base_model_name_or_path", "medusa_num_heads", "medusa_num_layers", "version"])
@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 0.5, True])
def test_odd_values_in_a_config_are_no_crash(tmp_path, key, value):
    write_original(tmp_path, original_heads(3, 1, DIM, VOCAB).state_dict(), **{key: value})
    assert load_config(tmp_path).num_heads == 3


def test_a_vocabulary_that_is_none_is_refused(tmp_path):
    state = original_heads(3, 1, DIM, None).state_dict()
    write_original(tmp_path, state, version="2", vocab_size="many")
    refused(tmp_path, r"vocab_size \('many'\) must be a whole number")


def test_weights_that_are_not_finite_are_not_decoded_with(base_directory, make_heads, tmp_path):
    heads = make_heads()
    next(heads.parameters()).data[0, 0] = float("inf")
    directory = save_heads(heads, tmp_path / "heads")
    with pytest.raises(ValueError, match=r"heads \(.*\) have .* with numbers that are not finite; train them again"):
        MedusaModel.from_pretrained(directory, base=base_directory)


def test_missing_files(make_heads, tmp_path):
    (save_heads(make_heads(), tmp_path / "native") / "heads.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no heads\.safetensors"):
        load_heads(tmp_path / "native")
    with pytest.raises(FileNotFoundError, match="does not exist; train heads first"):
        load_heads(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_heads(tmp_path)
    write_vllm(tmp_path / "vllm", {}, num_heads=2, num_hidden_layers=1, vocab_size=VOCAB)
    (tmp_path / "vllm" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        load_heads(tmp_path / "vllm")
    save_file({}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_heads(tmp_path)


@pytest.mark.parametrize("key", ["base", "architecture", "base_adapter"])
@pytest.mark.parametrize("value", [3, [], {}])
def test_odd_values_in_a_native_config_are_one_sentence(make_heads, tmp_path, key, value):
    change_config(save_heads(make_heads(), tmp_path), **{key: value})
    refused(tmp_path, rf"{key} \(.*\) must be text")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 9}, "does not fit its config"),
        ({"architecture": "hydra9"}, "choose one of: medusa, markov, hydra, recurrent"),
    ],
)
def test_a_native_config_of_other_heads(make_heads, tmp_path, values, message):
    change_config(save_heads(make_heads(), tmp_path), **values)
    refused(tmp_path, message)


@pytest.mark.parametrize("outside", ["/etc", "..", "adapter/../../other"])
def test_an_adapter_is_never_taken_from_elsewhere(make_heads, tmp_path, outside):
    """An export would copy whatever is there, and a push publish the copy."""
    change_config(save_heads(make_heads(), tmp_path / "heads"), base_adapter=outside)
    refused(tmp_path / "heads", "names an adapter outside of the heads' directory")
