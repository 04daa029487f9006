"""Concatenated whole documents, on which heads that remember are trained; documents do not see each other.

Legend: M positions of all documents, R of them where heads guess, n documents of a group, l positions and r guesses of
the longest of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.base.documents import document_lengths
from medusa.cache.window import unseen

STRETCH = 1.5
"""Documents of a group are padded to at most this many times their length."""
MOST_PAIRS = 1 << 22
"""Most pairs of a guess and a position, padding included, of a group of several documents."""


class Group(NamedTuple):
    """Documents that are computed together: one as it is, or several that are padded to one length.

    Attributes:
        text: Their positions among the M: a slice for one document, otherwise int64 [n, l].
        rows: Their guesses among the R: a slice, or int64 [n, r].
    """

    text: slice | Tensor
    rows: slice | Tensor


class Documents:
    """The documents of M positions.

    Args:
        text_places: int64 [M], position of each token in its document, from 0.
        wanted_M: bool, where heads guess.
        together: Compute several documents at a time. None = on a GPU, where each kernel costs more than the padding.
        window: See ``unseen`` of ``medusa.cache.window``.

    Attributes:
        text_places: As given.
        wanted: int64 [R], indices of the positions where heads guess.
        places: int64 [R], their positions in their documents.
        longest: Number of positions of the longest document.
    """

    def __init__(
        self, text_places: Tensor, wanted_M: Tensor, together: bool | None = None, window: int | None = None
    ) -> None:
        lengths = document_lengths(text_places).cpu()
        lengths = lengths if len(lengths) else lengths.new_zeros(1)
        self.text_places, self.longest = text_places, int(lengths.max())
        self.wanted = wanted_M.nonzero()[:, 0]
        self.places = text_places[self.wanted]
        of_R = torch.bucketize(self.wanted.cpu(), lengths.cumsum(0), right=True)
        self._counts = torch.bincount(of_R, minlength=len(lengths))
        self._lengths, self._window = lengths, window
        together = text_places.device.type != "cpu" if together is None else together
        self._picks: Tensor | None = None
        self._groups = self._padded() if together else self._alone()

    def groups(self, texts: Sequence[Tensor], rows: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Tensors [n, l, ..] of [M, ..], and [n, r, ..] of [R, ..], of each group."""
        for group in self._groups:
            yield [_take(text, group.text) for text in texts], [_take(row, group.rows) for row in rows]

    def unseen(self, places_nr: Tensor, length: int) -> Tensor:
        """Bool [n, r, length]: the positions of their documents that guesses at these places do not see."""
        return unseen(places_nr, length, self._window)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors [n, r, ..] of all groups as [R, ..], in the order of the documents, without padding."""
        rows = torch.cat([part.flatten(0, 1) for part in parts])
        return rows if self._picks is None else rows.index_select(0, self._picks)

    def _alone(self) -> list[Group]:
        ends, row_ends = self._lengths.cumsum(0).tolist(), self._counts.cumsum(0).tolist()
        texts = map(slice, [0, *ends], ends)
        return [Group(*parts) for parts in zip(texts, map(slice, [0, *row_ends], row_ends), strict=True)]

    def _padded(self) -> list[Group]:
        starts, row_starts = (sizes.cumsum(0) - sizes for sizes in (self._lengths, self._counts))
        groups, picks, padded = list[Group](), torch.empty(int(self._counts.sum()), dtype=torch.int64), 0
        device = self.text_places.device
        for members in self._alike():
            text_nl, rows_nr = _indices(starts, self._lengths, members), _indices(row_starts, self._counts, members)
            real_nr = torch.arange(rows_nr.shape[1]) < self._counts[members, None]
            picks[rows_nr[real_nr]] = padded + real_nr.flatten().nonzero()[:, 0]
            padded += rows_nr.numel()
            groups.append(Group(text_nl.to(device), rows_nr.to(device)))
        self._picks = picks.to(device)
        return groups

    def _alike(self) -> Iterator[Tensor]:
        """Documents of similar lengths, int64 [n], the longest ones first."""
        order = self._lengths.argsort(descending=True, stable=True)
        lengths, counts = self._lengths[order], self._counts[order]
        first = 0
        while first < len(order):
            longest, most, last = int(lengths[first]), int(counts[first]), first + 1
            while last < len(order) and int(lengths[last]) * STRETCH >= longest:
                most = max(most, int(counts[last]))
                if (last + 1 - first) * longest * most > MOST_PAIRS:
                    break
                last += 1
            yield order[first:last]
            first = last


def _indices(starts: Tensor, sizes: Tensor, members: Tensor) -> Tensor:
    """Indices [n, longest] of some documents, padded by their last ones (those without any by any index)."""
    ramp = torch.arange(int(sizes[members].max()))
    return (starts[members, None] + ramp.minimum(sizes[members, None] - 1)).clamp(min=0)


def _take(tensor: Tensor, at: slice | Tensor) -> Tensor:
    if isinstance(at, slice):
        return tensor[at][None]
    return tensor.index_select(0, at.flatten()).view(*at.shape, *tensor.shape[1:])
