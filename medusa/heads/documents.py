"""Whole documents behind each other, which heads that remember are trained on: none sees another.

Legend: M positions of some documents, R of them that are wanted.
"""

from torch import Tensor

from medusa.base.documents import document_lengths


class Documents:
    """Which positions belong together.

    Args:
        text_places: [M] of all positions, each document's counted from 0.
        wanted_M: Where heads guess.

    Attributes:
        text_places: As given.
        wanted: int64 [R], the positions where heads guess.
        places: [R] of these.
        longest: Positions of the longest document.
    """

    def __init__(self, text_places: Tensor, wanted_M: Tensor) -> None:
        self._lengths: list[int] = document_lengths(text_places).tolist() or [0]
        self._counts = [int(part.sum()) for part in wanted_M.split(self._lengths)]
        self.text_places, self.longest = text_places, max(self._lengths)
        self.wanted = wanted_M.nonzero()[:, 0]
        self.places = text_places[self.wanted]

    def of_text(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Tensors [M, ..] by document."""
        return list(zip(*(tensor.split(self._lengths) for tensor in tensors), strict=True))

    def of_wanted(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Tensors [R, ..] by document."""
        return list(zip(*(tensor.split(self._counts) for tensor in tensors), strict=True))
