"""Held-out accuracy counts at which rank each head has its label."""

import pytest
import torch

from medusa import BaseModel, HeadsConfig, build_heads
from medusa.train.evaluate import RANKS, count_ranks, rank_counts


@pytest.fixture
def model(base):
    return BaseModel.load(base, dtype=torch.float32, device="cpu")


def make_heads(model, num_heads, **options):
    torch.manual_seed(1)
    return build_heads(HeadsConfig(model.hidden_size, model.vocab_size, num_heads, **options)).requires_grad_(False)


def test_heads_that_cannot_tell_tokens_apart_are_not_right():
    flat = torch.zeros(2, 40)
    assert rank_counts(flat, torch.tensor([2, 39])).tolist() == [0, 0, 1, *[0] * (RANKS - 3)]
    assert not rank_counts(flat * torch.nan, torch.tensor([2, 39])).any()


def test_tokens_that_heads_cannot_draft_are_misses(model):
    heads = make_heads(model, 1, draft_vocab_size=20)
    heads.draft_ids.copy_(torch.arange(20) * 2)
    hidden, path = torch.randn(40, model.hidden_size), torch.zeros(40, 1, dtype=torch.int64)
    counts = count_ranks(heads, model, hidden, path, torch.arange(40)[:, None])[0]
    even = count_ranks(heads, model, hidden[::2], path[::2], torch.arange(40)[::2, None])[0]
    assert (counts[0], even[0]) == (40, 20)
    assert torch.equal(counts[1:], even[1:])
    assert counts[1:].any()


def test_chunks_change_nothing(model, monkeypatch):
    heads, hidden = make_heads(model, 2), torch.randn(11, model.hidden_size)
    path, labels = torch.randint(model.vocab_size, (11, 2)), torch.randint(-1, 40, (11, 2))
    whole = count_ranks(heads, model, hidden, path, labels)
    monkeypatch.setattr("medusa.train.evaluate.CHUNK", 3)
    assert torch.equal(count_ranks(heads, model, hidden, path, labels), whole)
    assert not count_ranks(heads, model, hidden[:0], path[:0], labels[:0]).any()
