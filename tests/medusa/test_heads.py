import json

import pytest
import torch

from medusa.formats import load_heads, save_heads
from medusa.heads import ARCHITECTURES, HeadsConfig, build_heads
from medusa.heads.frozen import freeze
from medusa.heads.layer import LayerConfig
from tests.medusa.kinds import MEMORYLESS

LAYER = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=12)


def config(**changes):
    sizes = {"hidden_size": 8, "vocab_size": 20, "num_heads": 3, "base": "some/base", "layer": LAYER}
    return HeadsConfig(**(sizes | changes))


def randomised(heads):
    torch.manual_seed(0)  # of many draws a few nearly cancel, which single precision shows
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


class Vocabulary:
    """A random base of width 8 with 20 tokens."""

    matrices = attention = None
    linear = True

    def __init__(self, dim=8, vocab_size=20):
        self.embed = torch.nn.Embedding(vocab_size, dim)
        self.logits = torch.nn.Linear(dim, vocab_size)


@pytest.mark.parametrize("architecture", MEMORYLESS)
def test_fresh_heads_predict_what_the_base_predicts(architecture):
    hidden, path, base = torch.randn(5, 8), torch.randint(20, (5, 3)), Vocabulary()
    features = build_heads(config(architecture=architecture, num_layers=2))(hidden, path, base)
    assert features.shape == (3, 5, 8)
    for head in features:
        torch.testing.assert_close(head, hidden)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fresh_own_lm_heads_start_as_the_base(architecture):
    hidden, weight = torch.randn(5, 8), torch.randn(20, 8)
    heads = build_heads(config(architecture=architecture, own_lm_heads=True))
    heads.init_from_base(weight)
    torch.testing.assert_close(heads.head_logits(2, hidden, Vocabulary()), hidden @ weight.T)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("architecture", MEMORYLESS)
@torch.no_grad()
def test_drafting_level_by_level_is_what_training_computes(architecture, own, frozen):
    """Three sequences; at every level two nodes are asked for, and the path runs through them alternately."""
    heads, base = randomised(build_heads(config(architecture=architecture, own_lm_heads=own))), Vocabulary()
    hidden, path = torch.randn(3, 8), torch.randint(20, (3, 3))
    expected = heads(hidden, path, base)
    if frozen:
        heads = freeze(heads, base)
    parents, state = torch.zeros(3, 1, dtype=torch.int64), heads.begin(hidden, base)
    tokens, at = path[:, :1], 0
    for head in range(3):
        logits, state = heads.level(head, state, parents, tokens, base)
        assert logits.shape[1] in (1, tokens.shape[1])
        logits = logits.expand(-1, tokens.shape[1], -1)
        torch.testing.assert_close(logits[:, at], heads.head_logits(head, expected[head], base), atol=1e-4, rtol=1e-4)
        if head < 2:
            parents, at = torch.full((3, 2), at), (head + 1) % 2
            tokens = torch.randint(20, (3, 2))
            tokens[:, at] = path[:, head + 1]


def test_medusa_blocks_follow_the_papers_equation():
    heads, hidden, path = randomised(build_heads(config(num_layers=2))), torch.randn(4, 8), torch.randint(20, (4, 3))
    for k in range(3):
        x = hidden
        for layer in range(2):
            x = x + torch.nn.functional.silu(x @ heads.weight[layer, k].T + heads.bias[layer, k])
        torch.testing.assert_close(heads(hidden, path, Vocabulary())[k], x)


def test_recurrent_blocks_follow_their_equation():
    heads = randomised(build_heads(config(architecture="recurrent", num_layers=2)))
    hidden, path, base = torch.randn(4, 8), torch.randint(20, (4, 3)), Vocabulary()
    state, features = hidden, heads(hidden, path, base)
    for k in range(3):
        embedding = base.embed(path[:, k])
        embedding = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
        for block in heads.blocks:
            inner = torch.cat([state, embedding], 1) @ block.inner.weight.T + block.inner.bias
            state = state + torch.nn.functional.silu(inner) @ block.outer.weight.T
        torch.testing.assert_close(features[k], state, atol=1e-3, rtol=1e-3)


def test_hydra_blocks_follow_the_papers_equation():
    heads = randomised(build_heads(config(architecture="hydra", num_layers=2)))
    hidden, path, base = torch.randn(4, 8), torch.randint(20, (4, 3)), Vocabulary()
    features, embeddings = heads(hidden, path, base), base.embed(path)
    embeddings = embeddings / embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    for k in range(3):
        x = hidden
        for block in heads.blocks[k]:
            inner = torch.cat([x, *embeddings[:, : k + 1].unbind(1)], 1) @ block.inner.weight.T + block.inner.bias
            x = x + torch.nn.functional.silu(inner) @ block.outer.weight.T
        torch.testing.assert_close(features[k], x, atol=1e-3, rtol=1e-3)


def test_the_markov_correction_is_of_low_rank_and_reads_the_token_before():
    heads, base = randomised(build_heads(config(architecture="markov", rank=2))), Vocabulary()
    hidden, path = torch.randn(4, 8), torch.randint(20, (4, 3))
    medusa = build_heads(config())
    medusa.load_state_dict({name: heads.state_dict()[name] for name in medusa.state_dict()})
    logits = base.logits(heads(hidden, path, base)) - base.logits(medusa(hidden, path, base))
    for k in range(3):
        embedding = base.embed(path[:, k])
        embedding = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
        left, right = base.logits.weight @ heads.up[k], heads.down[k] @ embedding.T
        assert (left.shape, right.shape) == ((20, 2), (2, 4))
        torch.testing.assert_close(logits[k], (left @ right).T, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_markov_corrections_are_made_before_a_soft_cap():
    heads, base = randomised(build_heads(config(architecture="markov"))), Vocabulary()
    linear = base.logits
    base.linear, base.logits = False, lambda hidden: 3 * torch.tanh(linear(hidden) / 3)
    hidden, path = torch.randn(4, 8), torch.randint(20, (4, 3))
    heads = freeze(heads, base)
    logits, _ = heads.level(1, heads.begin(hidden, base), path[:, :1] * 0, path[:, 1:2], base)
    torch.testing.assert_close(logits[:, 0], base.logits(heads(hidden, path, base)[1]))


@pytest.mark.parametrize(
    ("architecture", "block", "rest"),
    [
        ("medusa", 3 * (64 + 8), 0),
        ("markov", 3 * (64 + 8), 3 * 5 * (8 + 8)),
        ("hydra", (2 + 3 + 4) * 64 + 3 * (8 + 64), 0),
        ("recurrent", 256 + 16 + 128, 0),
    ],
)
def test_layers_are_different_layers(architecture, block, rest):
    heads = (build_heads(config(architecture=architecture, num_layers=n, rank=5)) for n in (1, 2, 3))
    assert [sum(p.numel() for p in h.parameters()) for h in heads] == [block * n + rest for n in (1, 2, 3)]


@pytest.mark.parametrize("feature_layers", [(), (1, 4)], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_frozen_heads_compute_the_same_and_can_still_be_saved(architecture, feature_layers, tmp_path):
    options = {"architecture": architecture, "num_layers": 2, "feature_layers": feature_layers, "layer": LAYER}
    heads = build_heads(HeadsConfig(128, 20, 4, **options)).eval()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    hidden = torch.randn(3, 128 * (1 + len(feature_layers)))
    path, base = torch.randint(20, (3, 4)), Vocabulary(128)
    with torch.no_grad():
        expected = heads(hidden, path, base)
        heads = freeze(heads, base)
        torch.testing.assert_close(heads(hidden, path, base), expected, atol=1e-5, rtol=1e-5)
        save_heads(heads, tmp_path)
        torch.testing.assert_close(load_heads(tmp_path)(hidden, path, base), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_frozen_heads_can_be_moved_and_frozen_again(architecture):
    heads = randomised(build_heads(HeadsConfig(128, 20, 2, architecture=architecture, layer=LAYER)))
    heads.eval().requires_grad_(False)
    hidden, path, base = torch.randn(3, 128).double(), torch.randint(20, (3, 2)), Vocabulary(128)
    heads = freeze(heads, base)
    heads.to(torch.float64)
    base.logits.double()
    heads = freeze(heads, base)
    frozen = heads(hidden, path, base)
    plain = build_heads(heads.config).double()
    plain.load_state_dict(heads.state_dict())
    torch.testing.assert_close(frozen, plain(hidden, path, base))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_heads_come_back_bit_equal(tmp_path, architecture, own):
    heads = randomised(build_heads(config(architecture=architecture, own_lm_heads=own, num_layers=2)))
    save_heads(heads, tmp_path / "heads", {"steps": 3})
    loaded = load_heads(tmp_path / "heads")
    assert loaded.config == heads.config
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert json.loads((tmp_path / "heads" / "provenance.json").read_text()) == {"steps": 3}
    assert {path.name for path in (tmp_path / "heads").iterdir()} == {
        "config.json", "heads.safetensors", "provenance.json",
    }  # fmt: skip


def test_a_local_base_is_stored_relative_to_the_heads(tmp_path):
    (tmp_path / "base").mkdir()
    save_heads(build_heads(config(base=str(tmp_path / "base"))), tmp_path / "runs" / "heads")
    assert load_heads(tmp_path / "runs" / "heads").config.base == "../../base"


@pytest.mark.parametrize("changes", [{"num_heads": 0}, {"num_layers": -1}, {"hidden_size": "8"}, {"rank": 0}])
def test_impossible_shapes_are_refused(changes):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        config(**changes)
