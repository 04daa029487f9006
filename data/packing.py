"""Packs samples into rows of one length; position ids keep documents apart.

Shapes: R rows, B rows of a batch, T tokens per row, K heads, S samples.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from medusa.data.sources import Sample

IGNORE = -100
"""Label of positions without a target (the value that torch's losses ignore)."""


@dataclass(frozen=True)
class PackedRows:
    """Rows in which each document's positions start at 0; the rest of a row is one document of padding."""

    input_ids: Tensor
    """int32 [R, T] token ids."""
    position_ids: Tensor
    """int32 [R, T]; a 0 begins a document."""
    loss_mask: Tensor
    """bool [R, T]; tokens of answers, which may be predicted. False on padding."""
    lengths: Tensor
    """int64 [R]; tokens of a row that are not padding."""
    samples: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [S]; `sample_digest` of every packed sample."""
    digest: str = ""
    """The stored fingerprint of rows on disk, which are too large to compute it again; empty = computed."""
    prompts: bool = False
    """Whether every token may be predicted, prompts too; ``loss_mask`` stays as it is."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def fill(self) -> float:
        """Share of all tokens that is not padding."""
        return float(self.lengths.sum()) / max(1, self.input_ids.numel())

    def take(self, rows: Tensor) -> "PackedRows":
        """Select rows by their indices; ``samples`` and ``digest`` are left out."""
        parts = self.input_ids[rows], self.position_ids[rows], self.loss_mask[rows], self.lengths[rows]
        return PackedRows(*parts, prompts=self.prompts)

    def supervised(self, rows: Tensor) -> Tensor:
        """bool [B, T]; tokens that may be predicted, of rows [B]."""
        return self.filled(rows) if self.prompts else self.loss_mask[rows]

    def filled(self, rows: Tensor) -> Tensor:
        """bool [B, T]; tokens that are not padding, of rows [B]."""
        return torch.arange(self.input_ids.shape[1]) < self.lengths[rows][:, None]

    def targets(self, rows: Tensor, num_heads: int) -> Tensor:
        """Targets of the base and heads 1..K: column k at position t holds token t+1+k of the same document.

        Args:
            rows: indices of rows [B].
            num_heads: K.

        Returns:
            int64 [B, T, 1 + K], the base's own next token first; `IGNORE` past the document's end and on tokens
            that are not supervised.
        """
        ids_BT, mask_BT = self.input_ids[rows].long(), self.supervised(rows)
        positions_BT = self.position_ids[rows]
        targets = ids_BT.new_full((*ids_BT.shape, 1 + num_heads), IGNORE)
        for column in range(1 + num_heads):
            ahead = column + 1
            # Inside a document positions grow by one per token; a boundary resets them.
            same_document = positions_BT[:, ahead:] - positions_BT[:, :-ahead] == ahead
            valid = same_document & mask_BT[:, ahead:]
            targets[:, :-ahead, column] = torch.where(valid, ids_BT[:, ahead:], IGNORE)
        return targets

    def fingerprint(self) -> str:
        """Digest of tokens, documents and masks: equal for equal training data."""
        digest = self.digest or self._digest()
        return f"{digest}-prompts" if self.prompts else digest

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in (self.input_ids, self.position_ids, self.loss_mask):
            digest.update(np.ascontiguousarray(tensor.numpy()).data)  # no copy: the rows may be larger than memory
        return digest.hexdigest()[:16]


def pack(samples: Sequence[Sample], row_tokens: int) -> PackedRows:
    """Pack samples into rows by best fit, longest first; deterministic.

    Samples longer than a row are cut into pieces; pieces in which no head has a target are dropped.

    Args:
        samples: token ids with loss masks.
        row_tokens: T.

    Raises:
        ValueError: nothing is left to train on.
    """
    if packed := pack_window(samples, row_tokens):
        return packed
    raise ValueError(
        f"samples ({len(samples)}) hold no supervised token past the second one; "
        "give samples whose loss mask marks what the base answers"
    )


def pack_window(samples: Sequence[Sample], row_tokens: int, prompts: bool = False) -> PackedRows:
    """Pack samples like `pack`, but return no rows if nothing is left; with `prompts` every token may be a target."""
    pieces = [piece for sample in samples for piece in _cut(sample, row_tokens, prompts)]
    rows = _best_fit([len(ids) for ids, _ in pieces], row_tokens)
    input_ids_RT = torch.zeros(len(rows), row_tokens, dtype=torch.int32)
    loss_mask_RT = torch.zeros(len(rows), row_tokens, dtype=torch.bool)
    position_ids_RT = torch.zeros_like(input_ids_RT)
    lengths_R = torch.zeros(len(rows), dtype=torch.int64)
    ramp_T = torch.arange(row_tokens, dtype=torch.int32)
    for row, members in enumerate(rows):
        start = 0
        for member in members:
            ids, mask = pieces[member]
            stop = start + len(ids)
            input_ids_RT[row, start:stop] = ids
            loss_mask_RT[row, start:stop] = mask
            position_ids_RT[row, start:stop] = ramp_T[: len(ids)]
            start = stop
        position_ids_RT[row, start:] = ramp_T[: row_tokens - start]
        lengths_R[row] = start
    digests_S = torch.tensor([sample_digest(sample) for sample in samples], dtype=torch.int64)
    return PackedRows(input_ids_RT, position_ids_RT, loss_mask_RT, lengths_R, digests_S, prompts=prompts)


def sample_digest(sample: Sample) -> int:
    """A digest of 64 bits of a sample's tokens, independent of the loss mask."""
    content = hashlib.blake2b(sample.input_ids.numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(content, signed=True)


def _cut(sample: Sample, row_tokens: int, prompts: bool) -> list[tuple[Tensor, Tensor]]:
    ids, mask = sample.input_ids.split(row_tokens), sample.loss_mask.split(row_tokens)
    # Head 1 first predicts token 2.
    return [(i, m) for i, m in zip(ids, mask, strict=True) if (len(m) > 2 if prompts else m[2:].any())]


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of items per row: each item, longest first, goes to the fullest row with enough space."""
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(space, (lengths[item], 0))
        if place == len(space):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free, row = space.pop(place)
        rows[row].append(item)
        if free > lengths[item]:
            insort(space, (free - lengths[item], row))
    return rows
