from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from medusa.data.packing import IGNORE, PackedRows, pack, pack_window
from medusa.data.sources import Sample


def _sample(ids: list[int], mask: list[int]) -> Sample:
    return Sample(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))


def _documents(packed: PackedRows) -> list[list[int]]:
    found = []
    for row, length in enumerate(packed.lengths.tolist()):
        starts = [*(packed.position_ids[row, :length] == 0).nonzero().squeeze(1).tolist(), length]
        found += [packed.input_ids[row, a:b].tolist() for a, b in pairwise(starts)]
    return found


def test_every_token_of_every_sample_is_packed_once() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(3, 17, (50,)).tolist()
    samples = [_sample([10 + n] * length, [0] + [1] * (length - 1)) for n, length in enumerate(lengths)]
    packed = pack(samples, row_tokens=16)
    assert sorted(_documents(packed)) == sorted(sample.input_ids.tolist() for sample in samples)
    assert packed.fill == pytest.approx(sum(lengths) / packed.input_ids.numel())
    assert packed.fill > 0.9


def test_best_fit_fills_the_gaps_and_is_deterministic() -> None:
    samples = [_sample([n] * n, [1] * n) for n in (3, 5, 7, 3, 5, 7)]
    packed = pack(samples, row_tokens=10)
    assert packed.lengths.tolist() == [10, 10, 10]
    assert packed.fingerprint() == pack(samples, row_tokens=10).fingerprint()
    assert packed.fingerprint() != pack(samples[::-1], row_tokens=12).fingerprint()


def test_padding_is_a_document_of_its_own_without_labels() -> None:
    packed = pack([_sample([1, 2, 3, 4], [1, 1, 1, 1])], row_tokens=8)
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    targets = packed.targets(torch.tensor([0]), num_heads=3)[0]
    assert (targets != IGNORE).sum(0).tolist() == [3, 2, 1, 0]
    assert targets[0].tolist() == [2, 3, 4, IGNORE]


def test_long_samples_are_cut_and_pieces_without_labels_dropped() -> None:
    packed = pack([_sample(list(range(20)), [0] * 12 + [1] * 8)], row_tokens=8)
    assert sorted(_documents(packed)) == [[8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19]]


def test_pieces_without_labels_stay_where_prompts_count() -> None:
    samples = [_sample(list(range(20)), [0] * 12 + [1] * 8), _sample([30, 31], [0, 0])]
    packed = pack_window(samples, row_tokens=8, prompts=True)
    assert sorted(_documents(packed)) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17, 18, 19]]
    targets = packed.targets(torch.arange(3), num_heads=1)
    assert int((targets[..., 1] != IGNORE).sum()) == 6 + 6 + 2


def test_more_heads_than_tokens_in_a_row() -> None:
    packed = pack([_sample([1, 2, 3], [1, 1, 1])], row_tokens=3)
    assert packed.targets(torch.tensor([0]), num_heads=5)[0, 0].tolist() == [2, 3, IGNORE, IGNORE, IGNORE, IGNORE]


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"samples \(1\) hold no supervised token"):
        pack([_sample([1, 2, 3], [1, 1, 0])], row_tokens=8)


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_no_target_crosses_a_document(seed: int, prompts: bool) -> None:
    """Against documents that are looked at one by one, in one window or several; of answers, or of prompts too."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 30, (40,), generator=generator).tolist()
    samples = []
    for number, length in enumerate(lengths):
        ids = torch.arange(length, dtype=torch.int32) + 100 * (number + 1)  # a token tells its document and place
        samples.append(Sample(ids, torch.rand(length, generator=generator) < 0.5))
    for windows in ([samples], [samples[:13], samples[13:]]):
        supervised = 0
        for window in windows:
            packed = replace(pack(window, row_tokens=16), prompts=prompts)
            rows = torch.arange(len(packed))
            targets = packed.targets(rows, num_heads=3)
            for row, place in (packed.input_ids > 0).nonzero().tolist():
                token = int(packed.input_ids[row, place])
                mask = samples[token // 100 - 1].loss_mask
                for ahead, target in enumerate(targets[row, place].tolist(), start=1):
                    inside = token % 100 % 16 + ahead < 16 and token % 100 + ahead < len(mask)
                    wanted = token + ahead if inside and (prompts or mask[token % 100 + ahead]) else IGNORE
                    assert target == wanted
                    supervised += wanted != IGNORE
            assert (targets[packed.input_ids == 0] == IGNORE).all(), "padding"
        assert supervised > 100
