"""Calibrations count what they say, survive the disk, and travel with their heads."""

import json

import pytest
import torch

from medusa import Calibration, MedusaModel
from medusa.budget.calibrate import _answer_counts, calibrate
from medusa.budget.calibration import RANKS, count_ranks, rank_counts
from medusa.formats.native import CALIBRATION, load_calibration, save_heads
from medusa.heads import ARCHITECTURES

PROMPTS = [[5, 6, 7], [9], [3, 4]]


@pytest.fixture
def calibration():
    return Calibration((10, 8), ((5, 2, 0), (4, 1, 1)), {"base": "tiny"})


def test_ranks_are_counted_from_the_best_token_on():
    logits = torch.arange(40.0).flip(0).repeat(5, 1)  # token 0 is the best
    assert rank_counts(logits, torch.tensor([0, 0, 3, -1, 39])).tolist() == [2, 0, 0, 1, *[0] * (RANKS - 4)]


def test_heads_that_cannot_tell_tokens_apart_are_not_right():
    flat = torch.zeros(2, 40)
    assert rank_counts(flat, torch.tensor([2, 39])).tolist() == [0, 0, 1, *[0] * (RANKS - 3)]
    assert not rank_counts(flat * torch.nan, torch.tensor([2, 39])).any()


def test_tokens_that_heads_cannot_draft_are_misses(base, make_heads):
    heads = make_heads(1, draft_vocab_size=20)
    heads.draft_ids.copy_(torch.arange(20) * 2)
    hidden, path = torch.randn(40, base.hidden_size, dtype=base.dtype), torch.zeros(40, 1, dtype=torch.int64)
    counts = count_ranks(heads, base, hidden, path, torch.arange(40)[:, None])[0]
    even = count_ranks(heads, base, hidden[::2], path[::2], torch.arange(40)[::2, None])[0]
    assert (counts[0], even[0]) == (40, 20)
    assert torch.equal(counts[1:], even[1:])
    assert counts[1:].any()


def test_accuracies_are_shares_of_a_heads_own_samples(calibration):
    assert calibration.accuracies == [[0.5, 0.2, 0.0], [0.5, 0.125, 0.125]]
    assert calibration.accuracies[1][2] == 0.125
    assert calibration.top(2) == pytest.approx([0.7, 0.625])
    assert Calibration((0,), ((0, 0),)).top(1) == [0.0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_are_asked_about_every_token_that_the_base_said(base, make_heads, architecture):
    """Against a loop over texts, positions and heads."""
    model = MedusaModel(base, make_heads(3, architecture=architecture))
    counts = torch.zeros(3, 2 + RANKS, dtype=torch.int64)
    for prompt in PROMPTS:
        text = prompt + model.generate(prompt, max_new_tokens=9, nodes=1).tokens
        hidden = base.hidden_states(torch.tensor([text]))[0]
        for t in range(max(0, len(prompt) - 2), len(text)):
            for head in range(3):
                if t + 2 + head < len(text):
                    path = torch.tensor([[*text[t + 1 : t + 2 + head], *[0] * (2 - head)]])
                    features = model.heads(hidden[None, t], path, base)[head]
                    ranked = model.heads.head_logits(head, features, base)[0].argsort(descending=True).tolist()
                    rank = ranked.index(text[t + 2 + head])
                    counts[head, 0] += 1
                    counts[head, 1 + min(rank, RANKS)] += 1
    found = calibrate(model, PROMPTS, max_new_tokens=9, source="by hand")
    assert found == Calibration.of(counts[:, :-1], found.provenance)
    assert found.samples[0] > found.samples[1] > found.samples[2] > 0
    assert found.provenance["data"] == {"source": "by hand", "answers": 3, "max_new_tokens": 9}


def test_chunks_change_nothing(base, make_heads, monkeypatch):
    heads, hidden = make_heads(2), torch.randn(11, base.hidden_size, dtype=base.dtype)
    path, labels = torch.randint(base.vocab_size, (11, 2)), torch.randint(-1, 40, (11, 2))
    whole = count_ranks(heads, base, hidden, path, labels)
    monkeypatch.setattr("medusa.budget.calibration.CHUNK", 3)
    assert torch.equal(count_ranks(heads, base, hidden, path, labels), whole)
    assert not count_ranks(heads, base, hidden[:0], path[:0], labels[:0]).any()


def test_a_prompt_and_an_answer_of_one_token_count_nothing(base, make_heads):
    counts = _answer_counts(MedusaModel(base, make_heads(3)), make_heads(3), [5], [0])
    assert counts.tolist() == [[0] * (1 + RANKS)] * 3


def test_what_cannot_be_calibrated_is_refused(base, model):
    with pytest.raises(ValueError, match="needs heads"):
        calibrate(MedusaModel(base), PROMPTS)
    with pytest.raises(ValueError, match=r"prompts \(0\)"):
        calibrate(model, [])
    with pytest.raises(ValueError, match="too short for head 3"):
        calibrate(model, PROMPTS, max_new_tokens=1)


def test_a_calibration_survives_the_disk(calibration, tmp_path):
    calibration.save(tmp_path / "x.json")
    assert Calibration.load(tmp_path / "x.json") == calibration


def test_heads_take_their_calibration_along_and_never_that_of_others(base, make_heads, tmp_path):
    counted = Calibration((9, 9, 9), ((5,), (4,), (4,)), {})
    MedusaModel(base, make_heads(3), calibration=counted).save_pretrained(tmp_path)
    assert MedusaModel.from_pretrained(tmp_path, base.name).calibration == counted
    with pytest.raises(ValueError, match="is of 3 heads and there are 2"):
        load_calibration(tmp_path, make_heads(2).config)
    save_heads(make_heads(3), tmp_path)
    assert not (tmp_path / CALIBRATION).exists()
    assert MedusaModel.from_pretrained(tmp_path, base.name).calibration is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "medusa-tree"}, "not of the format 'medusa-calibration'"),
        ({"format_version": 2}, "has format version 2; update"),
        ({"hits": [[5, 2], [4]]}, "damaged: .*equally many ranks"),
        ({"hits": [[5, 2]]}, "damaged: .*number of samples"),
        ({"hits": [[5, 9], [4, 0]]}, "damaged: .*10 samples"),
        ({"hits": [[5, -1], [4, 0]]}, "damaged: .*hits"),
        ({"samples": [10, "8"]}, "damaged: .*'8' is not a number of labels"),
        ({"samples": 10}, "damaged"),
        ({"provenance": 3}, "damaged"),
    ],
)
def test_damaged_calibrations_are_refused(calibration, tmp_path, change, message):
    path = tmp_path / "x.json"
    calibration.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_what_is_no_calibration_is_refused(tmp_path, content):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Calibration.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match="copy it again"):
        Calibration.load(tmp_path / "x.json")
