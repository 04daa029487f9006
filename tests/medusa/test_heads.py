import json

import pytest
import torch

from medusa.formats import load_heads, save_heads
from medusa.heads import HeadsConfig, build_heads


def config(**changes):
    return HeadsConfig(**({"hidden_size": 8, "vocab_size": 20, "num_heads": 3, "base": "some/base"} | changes))


def randomised(heads):
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


def test_fresh_heads_predict_what_the_base_predicts():
    hidden, root, lm_head = torch.randn(5, 8), torch.randn(5, 8), torch.nn.Linear(8, 20, bias=False)
    logits = build_heads(config(sees_root=True)).logits(hidden, root, lm_head)
    assert logits.shape == (3, 5, 20)
    for head in logits:
        torch.testing.assert_close(head, lm_head(hidden))


def test_fresh_own_lm_heads_start_as_the_base():
    hidden, weight = torch.randn(5, 8), torch.randn(20, 8)
    heads = build_heads(config(own_lm_heads=True))
    heads.init_from_base(weight)
    torch.testing.assert_close(heads.logits(hidden, hidden, lambda x: x)[2], hidden @ weight.T)


def test_blocks_follow_the_papers_equation():
    heads, hidden, root = randomised(build_heads(config(num_layers=2))), torch.randn(4, 8), torch.randn(4, 8)
    for k in range(3):
        x = hidden
        for layer in range(2):
            x = x + torch.nn.functional.silu(x @ heads.weight[layer, k].T + heads.bias[layer, k])
        torch.testing.assert_close(heads(hidden, root)[k], x)


def test_heads_that_see_the_root_add_its_projection_inside_the_first_block():
    heads, hidden, root = randomised(build_heads(config(sees_root=True))), torch.randn(4, 8), torch.randn(4, 8)
    unit = root / root.pow(2).mean(-1, keepdim=True).sqrt()
    for k in range(3):
        inner = hidden @ heads.weight[0, k].T + heads.bias[0, k] + unit @ heads.root_weight[k].T
        expected = hidden + torch.nn.functional.silu(inner)
        torch.testing.assert_close(heads(hidden, root)[k], expected, atol=1e-4, rtol=1e-4)


def test_layers_are_different_layers():
    sizes = [sum(p.numel() for p in build_heads(config(num_layers=n)).parameters()) for n in (1, 2, 3)]
    assert sizes == [3 * (64 + 8) * n for n in (1, 2, 3)]


@pytest.mark.parametrize("sees_root", [False, True])
def test_frozen_heads_compute_the_same(sees_root):
    heads = build_heads(HeadsConfig(128, 20, 4, num_layers=2, sees_root=sees_root)).eval()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    hidden, root = torch.randn(3, 128), torch.randn(3, 128)
    with torch.no_grad():
        expected = heads(hidden, root)
        heads.freeze()
        torch.testing.assert_close(heads(hidden, root), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_saved_heads_come_back_bit_equal(tmp_path, own):
    heads = randomised(build_heads(config(own_lm_heads=own, num_layers=2, sees_root=own)))
    save_heads(heads, tmp_path / "heads", {"steps": 3})
    loaded = load_heads(tmp_path / "heads")
    assert loaded.config == heads.config
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert json.loads((tmp_path / "heads" / "provenance.json").read_text()) == {"steps": 3}
    assert sorted(p.name for p in (tmp_path / "heads").iterdir()) == [
        "config.json",
        "heads.safetensors",
        "provenance.json",
    ]


def test_a_local_base_is_stored_relative_to_the_heads(tmp_path):
    (tmp_path / "base").mkdir()
    save_heads(build_heads(config(base=str(tmp_path / "base"))), tmp_path / "runs" / "heads")
    assert load_heads(tmp_path / "runs" / "heads").config.base == "../../base"


def damage_weights(directory):
    path = directory / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def remove_weights(directory):
    (directory / "heads.safetensors").unlink()


def garbage_config(directory):
    (directory / "config.json").write_text("{not json")


def other_format(directory):
    (directory / "config.json").write_text('{"model_type": "llama"}')


def other_shape(directory):
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"hidden_size": 9}))


def unknown_architecture(directory):
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"architecture": "hydra9"}))


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (damage_weights, ValueError, "is damaged"),
        (remove_weights, FileNotFoundError, r"has no heads\.safetensors"),
        (garbage_config, ValueError, "not valid JSON"),
        (other_format, ValueError, "not of the format"),
        (other_shape, ValueError, "does not fit its config"),
        (unknown_architecture, ValueError, "choose one of: medusa"),
    ],
)
def test_damaged_heads_give_one_clear_error(tmp_path, harm, error, message):
    save_heads(build_heads(config()), tmp_path)
    harm(tmp_path)
    with pytest.raises(error, match=message):
        load_heads(tmp_path)


def test_missing_heads_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; train heads first"):
        load_heads(tmp_path / "nothing")


@pytest.mark.parametrize("changes", [{"num_heads": 0}, {"num_layers": -1}, {"hidden_size": "8"}])
def test_impossible_shapes_are_refused(changes):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        config(**changes)
