"""Heads that other tools wrote, as they are found in the wild."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file

from medusa import MedusaModel
from medusa.formats import find_format, load_heads
from tests.medusa.formats.engines import original_heads, write_original, write_vllm
from tests.medusa.formats.stored import load_config

DIM, VOCAB = 8, 20


def randomised(modules):
    for parameter in modules.parameters():
        torch.nn.init.normal_(parameter)
    return modules


@pytest.fixture
def hidden():
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(3))


class Output:
    """A base's output layer."""

    def __init__(self, weight):
        self.weight = weight

    def logits(self, hidden):
        return hidden @ self.weight.T


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize(("layers", "repeat"), [(1, False), (2, False), (2, True)])
@torch.no_grad()
def test_version_1_is_read(tmp_path, hidden, name, layers, repeat):
    modules = randomised(original_heads(3, layers, DIM, VOCAB, repeat))
    directory = write_original(tmp_path, modules.state_dict(), name, medusa_num_layers=layers)
    assert find_format(directory).name == "medusa-v1"
    config = load_config(directory)
    assert (config.num_heads, config.num_layers, config.own_lm_heads) == (3, layers, True)
    assert (config.hidden_size, config.vocab_size, config.base) == (DIM, VOCAB, "some/base")
    torch.testing.assert_close(
        load_heads(directory).begin(hidden, Output(None)), torch.stack([head(hidden) for head in modules])
    )


@torch.no_grad()
def test_version_2_is_read(tmp_path, hidden):
    modules, output = randomised(original_heads(3, 1, DIM, None)), Output(torch.randn(VOCAB, DIM))
    directory = write_original(tmp_path, modules.state_dict(), "medusa_lm_head.safetensors", version="2")
    assert find_format(directory).name == "medusa-v2"
    assert load_config(directory).vocab_size == 0, "this directory does not tell it"
    expected = torch.stack([output.logits(head(hidden)) for head in modules])
    torch.testing.assert_close(load_heads(directory).begin(hidden, output), expected)


@pytest.mark.parametrize("said", [2, 7])
def test_the_tensors_tell_how_many_heads_there_are(tmp_path, caplog, said):
    """Published heads for Vicuna say 2 and are 5."""
    state = original_heads(5, 1, DIM, VOCAB).state_dict()
    directory = write_original(tmp_path, state, medusa_num_heads=said)
    with caplog.at_level(logging.WARNING):
        assert load_config(directory).num_heads == 5
    (record,) = caplog.records
    assert f"says medusa_num_heads {said}, but the tensors hold 5 and are used" in record.getMessage()
    assert load_heads(directory).begin(torch.zeros(1, DIM), Output(None)).shape == (5, 1, VOCAB)


def test_a_config_that_agrees_warns_of_nothing(tmp_path, caplog):
    load_config(write_original(tmp_path, original_heads(3, 1, DIM, VOCAB).state_dict(), hidden_size=DIM))
    assert not caplog.records


def test_the_stored_dtype_is_kept(tmp_path):
    modules = original_heads(3, 1, DIM, VOCAB).to(torch.bfloat16)
    directory = write_original(tmp_path, modules.state_dict())
    assert {tensor.dtype for tensor in load_heads(directory, dtype=None).state_dict().values()} == {torch.bfloat16}


def test_the_safetensors_are_read_where_a_pickle_is_there_too(tmp_path):
    modules = original_heads(3, 1, DIM, VOCAB)
    write_original(tmp_path, modules.state_dict(), "medusa_lm_head.safetensors")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no pickle")
    assert load_config(tmp_path).num_heads == 3


@pytest.mark.parametrize("names", [["adapter.safetensors"], ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]])
def test_lorax_weights_may_have_any_names(tmp_path, names):
    state = randomised(original_heads(4, 1, DIM, None)).state_dict()
    directory = write_original(tmp_path, {}, names[0], medusa_num_heads=4, version="2")
    for index, name in enumerate(names):
        save_file({key: state[key] for key in list(state)[index :: len(names)]}, directory / name)
    assert find_format(directory).name == "lorax"
    heads = load_heads(directory)
    for head in range(4):
        assert torch.equal(heads.weight[0, head], state[f"{head}.0.linear.weight"])
        assert torch.equal(heads.bias[0, head], state[f"{head}.0.linear.bias"])


def vllm_tensors(bias=True, prefix=""):
    state = randomised(original_heads(3, 1, DIM, None)).state_dict()
    return {
        f"{prefix}blocks.{head}.layers.0.{kind}": state[f"{head}.0.linear.{kind}"]
        for head in range(3)
        for kind in (["weight", "bias"] if bias else ["weight"])
    }


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_heads_without_biases_are_read(tmp_path, prefix):
    tensors = vllm_tensors(bias=False, prefix=prefix)
    outputs = {f"{prefix}lm_heads.{head}.weight": torch.randn(VOCAB, DIM) for head in range(3)}
    directory = write_vllm(tmp_path, tensors | outputs, num_heads=3, num_hidden_layers=1, hidden_size=DIM)
    assert find_format(directory).name == "vllm"
    heads = load_heads(directory)
    assert heads.config.vocab_size == VOCAB
    assert not heads.bias.any()
    for head in range(3):
        assert torch.equal(heads.weight[0, head], tensors[f"{prefix}blocks.{head}.layers.0.weight"])
        assert torch.equal(heads.lm_heads[head], outputs[f"{prefix}lm_heads.{head}.weight"])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("own", [False, True])
@torch.no_grad()
def test_a_token_map_in_any_order_is_read(tmp_path, hidden, own, whole):
    """vLLM scatters logits by it, and takes the rows that it names where the output layer is whole."""
    token_map, output = torch.tensor([9, 2, 17, 5], dtype=torch.int32), torch.randn(VOCAB, DIM)
    names = [f"lm_heads.{head}.weight" for head in range(3)] if own else ["lm_head.weight"]
    stored = {name: (output * (1 + index))[... if whole else token_map.long()] for index, name in enumerate(names)}
    tensors = vllm_tensors()
    directory = write_vllm(
        tmp_path, tensors | stored | {"token_map": token_map}, num_heads=3, num_hidden_layers=1, vocab_size=VOCAB,
        truncated_vocab_size=4, original_lm_head=not own, medusa_fc_bias=True,
    )  # fmt: skip
    heads = load_heads(directory)
    assert (heads.config.draft_vocab_size, heads.config.vocab_size) == (4, VOCAB)
    assert heads.draft_ids.tolist() == [2, 5, 9, 17]

    class Base(Output):
        def logits_of(self, tokens, pack=False):
            return lambda hidden: self.logits(hidden)[..., tokens]

    for head, logits in enumerate(heads.begin(hidden, Base(output))):
        inner = hidden @ tensors[f"blocks.{head}.layers.0.weight"].T + tensors[f"blocks.{head}.layers.0.bias"]
        expected = (hidden + torch.nn.functional.silu(inner)) @ output[[2, 5, 9, 17]].T * (1 + head if own else 1)
        torch.testing.assert_close(logits, expected)


def test_a_model_takes_the_vocabulary_of_its_base_where_heads_do_not_tell_it(base, base_directory, tmp_path):
    """Its draft tokens are those of the same heads with the size known, and its answer is the base's."""
    state = randomised(original_heads(3, 1, base.hidden_size, None)).state_dict()
    directory = write_original(
        tmp_path, state, "medusa_lm_head.safetensors", version="2", base_model_name_or_path=str(base_directory)
    )
    model = MedusaModel.from_pretrained(directory, dtype=torch.float64, device="cpu")
    assert model.heads.config.vocab_size == base.vocab_size
    plain = MedusaModel(base).generate([5, 6, 7], max_new_tokens=8).tokens
    assert model.generate([5, 6, 7], max_new_tokens=8, nodes=6).tokens == plain


def test_a_directory_of_something_else_says_what_is_known(base_directory, tmp_path):
    with pytest.raises(ValueError, match=r"it holds .*model\.safetensors.*not of a known format: native, medusa-v1"):
        find_format(base_directory)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    with pytest.raises(ValueError, match=r"it holds config\.json\) is not of a known format"):
        find_format(tmp_path)
