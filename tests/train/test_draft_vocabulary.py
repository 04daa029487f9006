"""Heads that learn to draft the most frequent tokens only."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa.base.model import BaseModel
from medusa.data.packing import IGNORE, PackedRows
from medusa.formats import load_heads
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.train.fresh_heads import most_frequent_tokens
from medusa.train.losses import HeadsLoss
from medusa.train.workers import Workers
from tests.train.jobs import Acting, assert_same_run, metrics, run
from tests.train.test_joint import row_loss

pytestmark = pytest.mark.usefixtures("no_pictures")

HEADS, ROWS, PART = 3, 29, 60


class Alone(Workers):
    """One of several processes whose counts are not added up."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return values.double()


ALONE = Alone(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def packed() -> PackedRows:
    generator = torch.Generator().manual_seed(0)
    ids = (torch.randn(37, 16, generator=generator) * 6).abs().int() + 3
    mask = torch.rand(37, 16, generator=generator) < 0.5
    return PackedRows(ids, torch.arange(16, dtype=torch.int32).expand(37, -1), mask, torch.full((37,), 16))


def test_the_most_frequent_supervised_tokens_are_chosen(packed: PackedRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa.train.fresh_heads.ROWS_AT_A_TIME", 5)
    counts = Counter(packed.input_ids[packed.loss_mask].tolist())
    order = sorted(range(50), key=lambda token: (-counts[token], token))
    assert len(counts) < 30
    for size in (3, 11, len(counts) + 5):
        chosen = most_frequent_tokens(packed, size, 50, ALONE)
        assert chosen.tolist() == sorted(order[:size])
    filled = most_frequent_tokens(packed, len(counts) + 3, 50, ALONE).tolist()
    assert set(filled) - set(counts) == {0, 1, 2}, "the lowest ids fill up"


def test_without_answers_the_tokens_of_prompts_are_chosen(packed: PackedRows) -> None:
    unanswered = replace(packed, loss_mask=torch.zeros_like(packed.loss_mask), prompts=True)
    everywhere = replace(packed, loss_mask=torch.ones_like(packed.loss_mask))
    chosen = most_frequent_tokens(unanswered, 11, 50, ALONE)
    assert torch.equal(chosen, most_frequent_tokens(everywhere, 11, 50, ALONE))


def test_processes_count_every_row_once(packed: PackedRows) -> None:
    parts: list[torch.Tensor] = []

    class Noting(Alone):
        def total(self, values: torch.Tensor) -> torch.Tensor:
            parts.append(values)
            return super().total(values)

    for rank in range(3):
        most_frequent_tokens(packed, 10, 50, Noting(rank, 3, torch.device("cpu")))
    expected = torch.bincount(packed.input_ids[packed.loss_mask].long(), minlength=50)
    assert torch.equal(sum(parts), expected)


def _heads(base: BaseModel, own: bool) -> DraftHeads:
    torch.manual_seed(0)
    config = HeadsConfig(base.hidden_size, base.vocab_size, HEADS, own_lm_heads=own, draft_vocab_size=PART)
    heads = build_heads(config).to(base.dtype)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    heads.draft_ids.copy_(torch.randperm(base.vocab_size)[:PART].sort().values)
    return heads


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["ce", "kl", "tv"])
def test_the_loss_leaves_other_tokens_out(base: Path, kind: str, own: bool) -> None:
    model = BaseModel.load(base, dtype=torch.float64, device="cpu")
    heads = _heads(model, own)
    hidden, teacher = (torch.randn(rows, model.hidden_size, dtype=torch.float64) for rows in (ROWS, ROWS + HEADS))
    labels = torch.randint(model.vocab_size, (ROWS, HEADS))
    labels[::2] = heads.draft_ids[torch.randint(PART, labels[::2].shape)]
    labels[torch.rand(ROWS, HEADS) < 0.2] = IGNORE
    index = torch.arange(ROWS)[:, None] + torch.arange(1, HEADS + 1)
    path, weights = torch.randint(model.vocab_size, (ROWS, HEADS)), torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)

    loss, loss_K, correct_K = HeadsLoss(heads, model, 7, kind)(hidden, path, labels, weights, teacher, index)

    features, expected, correct = heads(hidden, path, model), torch.zeros(HEADS, dtype=torch.float64), [0] * HEADS
    for head in range(HEADS):
        for row in range(ROWS):
            if labels[row, head] not in heads.draft_ids:
                continue
            matrix = heads.lm_heads[head] if heads.lm_heads is not None else model.lm_head_weight[heads.draft_ids]
            scores = matrix @ features[head, row]
            place = heads.draft_ids.tolist().index(int(labels[row, head]))
            expected[head] += row_loss(kind, scores, place, model.logits(teacher[index[row, head]])[heads.draft_ids])
            correct[head] += int(scores.argmax()) == place
    torch.testing.assert_close(loss_K, expected.detach(), rtol=0, atol=1e-9)
    assert correct_K.tolist() == correct
    parameters = list(heads.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad((expected * weights).sum(), parameters),
        atol=1e-9,
        rtol=0,
    )


@pytest.mark.slow
def test_a_run_with_a_draft_vocabulary_resumes_exactly(recipe: Path, tmp_path: Path, interrupted_at: Acting) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    values = {"heads.draft_vocab": 12, "heads.own_lm_heads": True, "optim.loss": "kl"}
    assert run(recipe, whole, **values) == 0
    with interrupted_at(5):
        assert run(recipe, parts, **values) == 130
    assert run(recipe, parts, **values) == 0

    assert_same_run(parts, whole, tolerance=1e-6)
    first, *_, last, end = metrics(whole)
    assert last["loss"] < first["loss"] - 0.1
    assert load_heads(parts / "heads").lm_heads.shape[1] == 12
    assert 0 < end["heldout_top10"][0] < 0.95, "what heads cannot draft is a miss"
