"""The block table of a pool: one line of block numbers per sequence, on the host and on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

LINES = 128
"""First number of lines; it doubles."""


class BlockTables:
    """Lines of block numbers. Line 0 belongs to no sequence and holds block 0 everywhere.

    Args:
        device: Device on which kernels read it.

    Attributes:
        epoch: Grows whenever the table moves to other memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros(LINES, 8, dtype=torch.int64)
        self._device, self._copy = device, self._host if device.type == "cpu" else self._host.to(device)
        self._free = list(range(LINES - 1, 0, -1))
        self._changed = False
        self.epoch = 0
        self._latest: tuple[list[int], int, Tensor] = [], 0, self._copy  # the last result of `of`, if it is a view

    def open(self) -> int:
        """Open a line for one more sequence."""
        if not self._free:
            lines = len(self._host)
            self._move(2 * lines, self._host.shape[1])
            self._free = list(range(2 * lines - 1, lines - 1, -1))
        return self._free.pop()

    def close(self, line: int) -> None:
        """Close the line of a sequence."""
        self._free.append(line)

    @torch.inference_mode()
    def write(self, line: int, first: int, blocks: Sequence[int]) -> None:
        """Write block numbers into a line, from index ``first`` on."""
        self.reach(first + len(blocks))
        self._host[line, first : first + len(blocks)] = torch.tensor(blocks, dtype=torch.int64)
        self._changed = True

    def reach(self, blocks: int) -> None:
        """Make lines at least ``blocks`` long."""
        if blocks > self._host.shape[1]:
            self._move(len(self._host), max(blocks, 2 * self._host.shape[1]))

    def tensor(self) -> Tensor:
        """The current table [lines, W] int64 on the device, at the same address until ``epoch`` changes."""
        if self._changed and self._copy is not self._host:
            with torch.inference_mode():
                self._copy.copy_(self._host)
        self._changed = False
        return self._copy

    def of(self, lines: Sequence[int]) -> Tensor:
        """The lines [S, W] int64 of some sequences."""
        table, (before, epoch, found) = self.tensor(), self._latest
        if before == lines and epoch == self.epoch:
            return found
        first, count = lines[0], len(lines)
        if list(lines) != list(range(first, first + count)):
            return table[torch.tensor(lines, device=self._device)]
        self._latest = list(lines), self.epoch, table[first : first + count]  # a view: later writes show in it
        return self._latest[2]

    def _move(self, lines: int, width: int) -> None:
        moved = torch.zeros(lines, width, dtype=torch.int64)
        moved[: self._host.shape[0], : self._host.shape[1]] = self._host
        self._host, self.epoch, self._changed = moved, self.epoch + 1, True
        self._copy = moved if self._device.type == "cpu" else torch.zeros_like(moved, device=self._device)
