"""Blocks of rows: what each step and each process gets."""

from itertools import chain

import pytest
import torch
from torch import Tensor

from medusa.data.packing import IGNORE, PackedRows, pack
from medusa.data.sources import Sample
from medusa.train.blocks import Block, MicroBatch
from medusa.train.config import OptimRecipe
from medusa.train.features import Positions

HEADS = 3


@pytest.fixture(scope="module")
def packed() -> PackedRows:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(60):
        length = int(torch.randint(4, 30, (1,), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        samples.append(Sample(torch.randint(1, 90, (length,), generator=generator, dtype=torch.int32), mask))
    return pack(samples, row_tokens=32)


def test_kept_positions_see_a_supervised_token() -> None:
    ids, masks = (torch.arange(1, 7), torch.arange(7, 10)), ([0, 0, 0, 0, 1, 0], [1, 0, 1])
    samples = [Sample(part.int(), torch.tensor(mask, dtype=torch.bool)) for part, mask in zip(ids, masks, strict=True)]
    kept = Positions.of(pack(samples, row_tokens=12), torch.tensor([0]), num_heads=2).kept
    assert kept[0].int().tolist() == [0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]


class NumberedStates:
    """The hidden state of a kept position is (row, place in the row): it says where it came from."""

    def __init__(self, packed: PackedRows) -> None:
        self._packed = packed

    def read(self, rows_B: Tensor) -> Tensor:
        kept = [(row, place) for row in rows_B.tolist() for place in range(self._count(row))]
        return torch.tensor(kept, dtype=torch.float32).reshape(-1, 2)

    def _count(self, row: int) -> int:
        return len(Positions.of(self._packed, torch.tensor([row]), HEADS).targets)


def _step(packed: PackedRows, optim: OptimRecipe, step: int, world_size: int, size: int = 7) -> list[list[MicroBatch]]:
    """Micro-batches of every process."""
    first, states = step - step % optim.mix_steps, NumberedStates(packed)
    blocks = [Block(optim, packed, HEADS, first, optim.mix_steps, rank, world_size) for rank in range(world_size)]
    return [[batch for batch, _ in block.micro_batches(step, states, size)] for block in blocks]


def _lines(batches: list[list[MicroBatch]]) -> list[tuple[object, ...]]:
    """One comparable line per position of the step."""
    flat = [batch for process in batches for batch in process]
    return sorted(
        (*hidden, *path, *labels)
        for batch in flat
        for hidden, path, labels in zip(batch.hidden.tolist(), batch.path.tolist(), batch.labels.tolist(), strict=True)
    )


@pytest.mark.parametrize("mix_steps", [1, 4])
def test_a_step_is_the_same_for_any_number_of_processes(packed: PackedRows, mix_steps: int) -> None:
    optim = OptimRecipe(rows_per_step=5, mix_steps=mix_steps, seed=3)
    for step in range(4):
        alone = _step(packed, optim, step, world_size=1)
        for world_size in (2, 3, 5):
            batches = _step(packed, optim, step, world_size)
            assert _lines(batches) == _lines(alone)
            assert len({len(process) for process in batches}) == 1
            assert all(len(batch.hidden) <= 7 for process in batches for batch in process)


def test_mixing_deals_every_position_out_once_and_evenly(packed: PackedRows) -> None:
    plain, mixed = OptimRecipe(rows_per_step=4, seed=1), OptimRecipe(rows_per_step=4, seed=1, mix_steps=4)
    ours = [_lines(_step(packed, mixed, step, 1)) for step in range(4)]
    theirs = [_lines(_step(packed, plain, step, 1)) for step in range(4)]
    assert sorted(chain(*ours)) == sorted(chain(*theirs))
    assert max(map(len, ours)) - min(map(len, ours)) <= 1
    assert all(len({line[0] for line in lines}) > 10 for lines in ours)  # rows of a step
    assert all(len({line[0] for line in lines}) <= 4 for lines in theirs)


def test_seeds_and_blocks_deal_positions_differently(packed: PackedRows) -> None:
    class Places:
        """The hidden state of a position is its place in the block."""

        def read(self, rows_B: Tensor) -> Tensor:
            return torch.arange(len(Positions.of(packed, rows_B, HEADS).targets))[:, None]

    def dealt(seed: int, first: int) -> tuple[float, ...]:
        optim = OptimRecipe(rows_per_step=len(packed), seed=seed, mix_steps=2)
        block = Block(optim, packed, HEADS, first, 2, 0, 1)
        ((batch, _),) = block.micro_batches(first, Places(), 10_000)
        return tuple(batch.hidden.flatten().tolist())

    deals = [dealt(1, 0), dealt(2, 0), dealt(1, 2), dealt(2, 2)]
    assert dealt(1, 0) == deals[0] and len(set(deals)) == 4
    assert len({len(deal) for deal in deals}) == 1


def test_label_counts_are_those_of_the_step_over_all_processes(packed: PackedRows) -> None:
    optim = OptimRecipe(rows_per_step=4, mix_steps=2)
    block = Block(optim, packed, HEADS, first=2, steps=2, rank=1, world_size=2)
    for step in (2, 3):
        labels = torch.cat([batch.labels for process in _step(packed, optim, step, 2) for batch in process])
        assert block.label_counts(step)[1:].tolist() == (labels != IGNORE).sum(0).tolist()


def test_the_last_block_may_be_short(packed: PackedRows) -> None:
    block = Block(OptimRecipe(rows_per_step=4, mix_steps=8), packed, HEADS, first=8, steps=1, rank=0, world_size=1)
    batches = [batch for batch, _ in block.micro_batches(8, NumberedStates(packed), 1000)]
    assert len(batches) == 1
    assert len(batches[0].hidden) == len(block.positions.targets)


@pytest.mark.parametrize("mix_steps", [1, 4])
def test_a_teacher_stands_where_the_base_says_the_label(packed: PackedRows, mix_steps: int) -> None:
    optim = OptimRecipe(rows_per_step=4, mix_steps=mix_steps, loss="kl")
    checked = 0
    for process in _step(packed, optim, 0, world_size=2):
        for batch in process:
            assert batch.teacher is not None
            assert batch.teacher_index is not None
            for place, head in (batch.labels != IGNORE).nonzero().tolist():
                row, position = batch.teacher[batch.teacher_index[place, head]].int().tolist()
                targets = Positions.of(packed, torch.tensor([row]), HEADS).targets
                assert targets[position, 0] == batch.labels[place, head]  # the base's own next token there
                assert [row, position - head - 1] == batch.hidden[place].int().tolist()
                checked += 1
    assert checked > 50


def whole_documents(packed: PackedRows) -> NumberedStates:
    class Counted(NumberedStates):
        def _count(self, row: int) -> int:
            return int(packed.lengths[row])

    return Counted(packed)


def test_whole_documents_share_their_labels_among_the_steps_of_a_block(packed: PackedRows) -> None:
    optim, counts = OptimRecipe(rows_per_step=2, seed=3), []
    block = Block(optim, packed, HEADS, first=0, steps=3, rank=0, world_size=1, whole=True)
    labels = block.positions.targets[:, 1:]
    every = torch.full_like(labels, IGNORE)
    for step in range(3):
        batches = [batch for batch, _ in block.micro_batches(step, whole_documents(packed), 4)]
        assert len(torch.cat([batch.hidden for batch in batches])) == len(labels), "each step reads all documents"
        own = torch.cat([batch.labels for batch in batches])
        assert (every[own != IGNORE] == IGNORE).all(), "no label belongs to two steps"
        every = torch.where(own == IGNORE, every, own)
        assert (own != IGNORE).sum(0).tolist() == block.label_counts(step)[1:].tolist()
        counts.append(int((own != IGNORE).sum()))
    assert torch.equal(every, labels)
    assert min(counts) > 0.5 * max(counts)


def test_whole_documents_stay_in_rows_for_any_number_of_processes(packed: PackedRows) -> None:
    """Two rows at a time, prompts too, and as many micro-batches on every process."""
    optim = OptimRecipe(rows_per_step=5, seed=3)

    def step(world_size: int) -> list[list[MicroBatch]]:
        blocks = [Block(optim, packed, HEADS, 2, 1, rank, world_size, whole=True) for rank in range(world_size)]
        return [[batch for batch, _ in block.micro_batches(2, whole_documents(packed), 2)] for block in blocks]

    alone = step(1)
    assert [len(batch.hidden[:, 0].unique()) for batch in alone[0]] == [2, 2, 1]
    for world_size in (2, 3):
        batches = step(world_size)
        assert _lines(batches) == _lines(alone)
        assert len({len(process) for process in batches}) == 1
    for batch in alone[0]:
        assert batch.places is not None
        begins = batch.places == 0
        assert bool((batch.places[1:] - batch.places[:-1])[~begins[1:]].eq(1).all())
        assert bool(begins[0])
