"""Concatenated whole documents, on which heads that remember are trained; documents do not see each other.

Legend: M positions of all documents, R of them where heads guess.
"""

from torch import Tensor

from medusa.base.documents import document_lengths


class Documents:
    """The documents of M positions.

    Args:
        text_places: int64 [M], position of each token in its document, from 0.
        wanted_M: bool, where heads guess.

    Attributes:
        text_places: As given.
        wanted: int64 [R], indices of the positions where heads guess.
        places: int64 [R], their positions in their documents.
        longest: Number of positions of the longest document.
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
