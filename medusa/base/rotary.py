"""Rotary positions that are looked up in tables: those of a base's decoder, and those of heads with layers like it."""

from collections.abc import Callable

from torch import Tensor

POSITIONS = 1024
"""Rows of the first table of angles; later tables double."""


class Rotary:
    """Rotary positions, from tables that grow.

    Args:
        angles: Computes cosines and sines [positions, d] of the first positions, given their number and a tensor of the
            dtype and on the device that they are to have.
    """

    def __init__(self, angles: Callable[[int, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._angles = angles
        self._tables: list[tuple[Tensor, Tensor]] = []  # recorded steps keep reading old tables

    def tables(self, reach: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, d] of at least ``reach`` positions, in the dtype and device of ``like``."""
        for cosines, sines in self._tables:
            if len(cosines) >= reach and cosines.dtype == like.dtype and cosines.device == like.device:
                return cosines, sines
        rows = POSITIONS
        while rows < reach:
            rows *= 2
        self._tables.append(self._angles(rows, like))
        return self._tables[-1]

    def at(self, positions: Tensor, reach: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, d] of positions [...].

        Args:
            positions: int64.
            reach: Larger than all positions.
            like: See ``tables``.
        """
        cosines, sines = (table[positions].unsqueeze(-2) for table in self.tables(reach, like))
        return cosines, sines
