"""Heads that remember, in training: over whole documents as they draft, apart from their neighbours."""

from functools import partial
from pathlib import Path

import pytest
import torch

from medusa import BaseModel, DraftHeads, HeadsConfig, build_heads
from medusa.data.packing import IGNORE, pack
from medusa.data.sources import Sample
from medusa.formats import load_heads
from medusa.heads.documents import Documents
from medusa.heads.layer import LayerConfig
from medusa.train.blocks import Block
from medusa.train.config import OptimRecipe
from medusa.train.features import BasePass, Positions
from medusa.train.losses import HeadsLoss
from tests.medusa.remembering import recomputed
from tests.train.jobs import Acting, assert_same_run, metrics, run

pytestmark = pytest.mark.usefixtures("no_pictures")

HEADS = 3
ATTENTION, BLOCK = {"own_lm_heads": True}, {"num_layers": 2, "rank": 4}
SHAPES = {
    "attention": (ATTENTION, None), "block": (BLOCK, None), "attention, a window": (ATTENTION, 6),
    "block, a window": (BLOCK, 6),
}  # fmt: skip
"""Of heads, and their windows."""
RECIPES = {
    "attention": {"heads.architecture": "attention", "heads.feature_layers": 1, "heads.own_lm_heads": True},
    "block": {"heads.architecture": "block", "heads.feature_layers": 1, "heads.rank": 8, "heads.window": 9},
}


@pytest.fixture(scope="module")
def frozen(base: Path) -> BaseModel:
    return BaseModel.load(base, dtype=torch.float64, device="cpu").tapped((1,))


@pytest.fixture(
    scope="module",
    params=[
        "attention", "block, a window", pytest.param("block", marks=pytest.mark.slow),
        pytest.param("attention, a window", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def heads(request: pytest.FixtureRequest, frozen: BaseModel) -> DraftHeads:
    torch.manual_seed(0)
    options, window = SHAPES[request.param]
    config = HeadsConfig(
        frozen.hidden_size, frozen.vocab_size, HEADS, architecture=request.param.partition(",")[0], feature_layers=(1,),
        layer=LayerConfig.of(frozen.config, window=window), **options,
    )  # fmt: skip
    heads = build_heads(config).double()
    heads.init_from_base(frozen.lm_head_weight)
    for parameter in heads.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return heads


def sample(length: int, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 90, (length,), generator=generator, dtype=torch.int32)
    return Sample(ids, torch.arange(length) >= max(length // 2, length - 16))


@torch.no_grad()
def test_trained_logits_are_those_of_a_draft_along_the_text(frozen: BaseModel, heads: DraftHeads) -> None:
    """Of two documents in a row; where nothing is learnt nothing is computed."""
    documents = [sample(79, 1), sample(11, 2)]
    packed, rows = pack(documents, row_tokens=96), torch.tensor([0])
    positions = Positions.of(packed, rows, HEADS, whole=True)
    labels = positions.targets[:, 1:]
    hidden = BasePass(frozen, packed, HEADS, 1, whole=True).read(rows)
    features = heads(hidden, positions.path, frozen, positions.places, (labels != IGNORE).any(1))
    compared = 0
    for head in range(HEADS):
        logits = heads.head_logits(head, features[head], frozen)
        for number, row in enumerate(logits):
            if labels[number, head] != IGNORE:
                text = documents[number >= 79].input_ids.tolist()
                end = int(positions.places[number]) + 2
                torch.testing.assert_close(row, recomputed(heads, frozen, text[:end], text[end : end + head]))
                compared += 1
    assert compared == HEADS * (16 + 6)


def test_documents_are_computed_together_as_alone(
    frozen: BaseModel, heads: DraftHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: groups of similar length with padding, documents without a guess, and a limit that splits them."""
    lengths = [21, 3, 20, 9, 8, 19, 9, 40, 2]
    places = torch.cat([torch.arange(length) for length in lengths])
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(len(places), frozen.feature_size, dtype=torch.float64, generator=generator)
    path = torch.randint(1, 90, (len(places), HEADS), generator=generator)
    wanted = torch.rand(len(places), generator=generator) < 0.4
    wanted[21:24] = False
    found = []
    for together, pairs in ((False, 1), (True, 1 << 22), (True, 300)):
        monkeypatch.setattr("medusa.heads.documents.MOST_PAIRS", pairs)
        monkeypatch.setattr("medusa.heads.remembering.Documents", partial(Documents, together=together))
        features = heads(hidden, path, frozen, places, wanted)
        heads.zero_grad()
        features.square().sum().backward()
        found.append([features.detach(), *(one.grad.clone() for one in heads.parameters() if one.grad is not None)])
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(found[0]) > 9 and found[0][0].any(2).all(0).equal(wanted)


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_a_neighbour_changes_nothing(frozen: BaseModel, heads: DraftHeads, kind: str) -> None:
    """The loss of a document and its gradients, whatever stands before it and behind it in the row."""
    found = []
    for seed in (5, 6):
        packed = pack([sample(21, seed), sample(11, 2), sample(9, seed)], row_tokens=48)
        block = Block(
            OptimRecipe(rows_per_step=1, loss=kind), packed, HEADS, 0, 1, 0, 1, frozen.hidden_size, whole=True
        )
        ((batch, last),) = block.micro_batches(0, BasePass(frozen, packed, HEADS, 1, whole=True), 1)
        batch.labels[:21] = batch.labels[32:] = IGNORE
        module = HeadsLoss(heads, frozen, 64, kind)
        module.zero_grad()
        hidden = batch.hidden.double()
        teacher = None if batch.teacher is None else batch.teacher.double()
        weights = torch.tensor([1.0, 0.7, 0.5], dtype=torch.float64)
        loss, *_ = module(hidden, batch.path, batch.labels, weights, teacher, batch.teacher_index, batch.places)
        loss.backward()
        assert last and float(loss.detach()) > 0
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in heads.parameters())])
    assert any(bool(gradient.any()) for gradient in found[0][1:])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("heads", ["block"], indirect=True)
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
    ("kind", "way", "killed"),
    [
        ("attention", {"cache.mode": "hybrid", "optim.mix_steps": 3}, False),
        ("block", {"lora.rank": 2, "heads.mask_token": 3}, True),
        pytest.param("attention", {"lora.rank": 2}, False, marks=pytest.mark.slow),
        pytest.param("block", {"heads.own_lm_heads": True}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_they_learn_and_a_killed_run_ends_as_another(
    recipe: Path, tmp_path: Path, interrupted_at: Acting, kind: str, way: dict[str, object], killed: bool
) -> None:
    values = RECIPES[kind] | {"optim.lr": 0.03, "optim.micro_rows": 4, "evaluate.every_steps": 0} | way
    assert run(recipe, tmp_path / "whole", **values) == 0
    if killed:
        with interrupted_at(6):
            assert run(recipe, tmp_path / "killed", **values) == 130
        assert run(recipe, tmp_path / "killed", **values) == 0
        assert_same_run(tmp_path / "killed", tmp_path / "whole", tolerance=1e-6)
    written = load_heads(tmp_path / "whole" / "heads").config.layer
    assert written is not None and written.window == values.get("heads.window")
    first, *_, last, figures = metrics(tmp_path / "whole")
    assert all(end < 0.6 * start for start, end in zip(first["head_loss"], last["head_loss"], strict=True))
    assert all(share > 0.1 for share in figures["heldout_top1"])


def test_what_they_cannot_be_is_refused(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind, values in RECIPES.items():
        assert run(recipe, tmp_path, **values, **{"optim.mix_steps": 0}) == 2
        assert f"optim.mix_steps (0) lets {kind} heads read all documents in every step; set it to 4" in caplog.text
    assert run(recipe, tmp_path, **RECIPES["attention"], **{"heads.num_layers": 2}) == 2
    assert "heads.num_layers (2) is not for attention heads, which are one layer; set it to 1" in caplog.text
