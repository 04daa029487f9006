"""Block heads in training: at every position that has a label a block, which sees its own document up to there."""

from pathlib import Path

import pytest
import torch

from medusa import BaseModel, DraftHeads, HeadsConfig, build_heads
from medusa.data.packing import IGNORE, pack
from medusa.heads.layer import LayerConfig
from medusa.train.features import BasePass, Positions
from tests.medusa.block_by_hand import recomputed
from tests.train.jobs import Acting, assert_same_run, metrics, run
from tests.train.test_attention_heads import sample

pytestmark = pytest.mark.usefixtures("no_pictures")

HEADS = 3
BLOCK = {"heads.architecture": "block", "heads.feature_layers": 1, "heads.rank": 8}


@pytest.fixture(scope="module")
def frozen(base: Path) -> BaseModel:
    return BaseModel.load(base, dtype=torch.float64, device="cpu").tapped((1,))


@pytest.fixture(scope="module")
def heads(frozen: BaseModel) -> DraftHeads:
    torch.manual_seed(0)
    config = HeadsConfig(
        frozen.hidden_size, frozen.vocab_size, HEADS, architecture="block", feature_layers=(1,), num_layers=2, rank=4,
        layer=LayerConfig.of(frozen.config),
    )  # fmt: skip
    heads = build_heads(config).double()
    heads.init_from_base(frozen.lm_head_weight)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return heads


@torch.no_grad()
def test_trained_logits_are_those_of_a_draft_along_the_text(frozen: BaseModel, heads: DraftHeads) -> None:
    """Of two documents in a row; where nothing is learnt nothing is computed."""
    packed, rows = pack([sample(17, 1), sample(11, 2)], row_tokens=32), torch.tensor([0])
    positions = Positions.of(packed, rows, HEADS, whole=True)
    labels = positions.targets[:, 1:]
    hidden = BasePass(frozen, packed, HEADS, 1, whole=True).read(rows)
    features = heads(hidden, positions.path, frozen, positions.places, (labels != IGNORE).any(1))
    logits, compared = frozen.logits(features), 0
    for head, number in (labels.T != IGNORE).nonzero().tolist():
        text, end = sample(*((17, 1) if number < 17 else (11, 2))).input_ids.tolist(), int(positions.places[number]) + 2
        expected = recomputed(heads, frozen, text[:end], text[end : end + head])
        torch.testing.assert_close(logits[head, number], expected)
        compared += 1
    assert compared == HEADS * (9 + 6)


def test_a_neighbour_changes_nothing(frozen: BaseModel, heads: DraftHeads) -> None:
    """The features of a document and their gradients, whatever stands before it and behind it in the row."""
    found = []
    for seed in (5, 6):
        packed, rows = pack([sample(21, seed), sample(11, 2), sample(9, seed)], row_tokens=48), torch.tensor([0])
        positions = Positions.of(packed, rows, HEADS, whole=True)
        hidden = BasePass(frozen, packed, HEADS, 1, whole=True).read(rows)
        wanted = torch.zeros(41, dtype=torch.bool)
        wanted[:29] = True
        features = heads(hidden, positions.path, frozen, positions.places, wanted)[:, 21:29]
        heads.zero_grad()
        (features * torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)).sum().backward()
        found.append([features.detach(), *(parameter.grad.clone() for parameter in heads.parameters())])
    assert any(bool(gradient.any()) for gradient in found[0][1:])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_a_block_sees_nothing_behind_its_root(frozen: BaseModel, heads: DraftHeads) -> None:
    """Head k's feature depends on the text up to the root, and on the k-th token behind."""
    hidden, path = torch.randn(12, 2 * frozen.hidden_size).double(), torch.randint(1, 90, (12, HEADS))
    before = heads(hidden, path, frozen)[:, 6]
    hidden[7:] += 1
    path[7:] += 1
    torch.testing.assert_close(heads(hidden, path, frozen)[:, 6], before)
    path[6, 1] += 1
    after = heads(hidden, path, frozen)[:, 6]
    assert [torch.allclose(*pair) for pair in zip(after, before, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    "way",
    [{}, {"cache.mode": "hybrid", "heads.own_lm_heads": True}, {"lora.rank": 2, "heads.mask_token": 3}],
    ids=str,
)
def test_they_learn_and_a_killed_run_ends_as_another(
    recipe: Path, tmp_path: Path, interrupted_at: Acting, way: dict[str, object]
) -> None:
    values = BLOCK | {"optim.steps": 12, "evaluate.every_steps": 0} | way
    assert run(recipe, tmp_path / "whole", **values) == 0
    with interrupted_at(6):
        assert run(recipe, tmp_path / "killed", **values) == 130
    assert run(recipe, tmp_path / "killed", **values) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole", tolerance=1e-6)
    first, *_, last, figures = metrics(tmp_path / "whole")
    assert all(end < 0.6 * start for start, end in zip(first["head_loss"], last["head_loss"], strict=True))
    assert all(share > 0.1 for share in figures["heldout_top1"])


def test_positions_are_not_mixed(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(recipe, tmp_path, **BLOCK, **{"optim.mix_steps": 4}) == 2
    assert "optim.mix_steps (4) takes documents apart, which block heads read whole; set it to 1" in caplog.text
