"""The tensors of a GGUF file: only the header is read at first, and values when they are needed."""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32
"""Alignment of tensors in bytes, if the file gives none."""
STRING, ARRAY = 8, 9
FIXED = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""``struct``'s format letters for the types of single values in a header."""
LIST = 1024
"""Longest list in a header that is read: one value for each layer, but no vocabulary."""
SLICE = 2**20
"""Number of values that are expanded at a time, because the package ``gguf`` needs a multiple of their memory."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a GGUF file.

    Attributes:
        name: llama.cpp's name.
        kind: Name of its type.
        shape: Shape in torch's order.
        data: uint8 [..., bytes of a row], mapped from the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: "np.ndarray[Any, np.dtype[np.uint8]]"

    def blocks(self) -> Tensor:
        """A copy of ``data``."""
        return torch.from_numpy(np.array(self.data))

    def numbers(self) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Its values, expanded to float32.

        Raises:
            ValueError: The package ``gguf`` cannot expand its type.
        """
        from gguf import GGMLQuantizationType, dequantize

        # Views of a mapped file's type are slow, and so is the package where rows are many.
        rows = np.asarray(self.data).reshape(-1, self.data.shape[-1])
        found = np.empty((len(rows), self.shape[-1]), np.float32)
        step = max(1, SLICE // max(1, self.shape[-1]))
        try:
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                numbers = dequantize(part.reshape(1, -1), GGMLQuantizationType[self.kind])
                found[start : start + step] = numbers.reshape(len(part), -1)
        except NotImplementedError as error:
            raise ValueError(f"tensor {self.name} is of type {self.kind}, which cannot be expanded") from error
        return found.reshape(self.shape)

    def tensor(self) -> Tensor:
        """The same as a tensor."""
        return torch.from_numpy(self.numbers())


def stored_tensors(file: Path) -> tuple[dict[str, Any], list[Stored]]:
    """The values of a file's header, without lists longer than ``LIST``, and its tensors.

    Raises:
        ImportError: The package ``gguf`` is missing.
        ValueError: The file is not a GGUF file, is cut short, or holds a tensor of an unknown type.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quant_shape_to_byte_shape

    header = _Header(file)
    values, table, place = header.read()
    place += -place % values.get("general.alignment", ALIGNMENT)
    tensors, known = [], {kind.value: kind for kind in GGMLQuantizationType}
    for name, shape, number, offset in table:
        if number not in known:
            raise ValueError(f"tensor {name} is of type {number}, which the package gguf does not know")
        kind = known[number]
        numbers, size = GGML_QUANT_SIZES[kind]
        data = header.content[place + offset :][: prod(shape) // numbers * size]
        if len(data) < prod(shape) // numbers * size:
            raise ValueError(f"it is cut short: it ends ({len(header.content)} bytes) before tensor {name} does")
        tensors.append(Stored(name, kind.name, shape, data.reshape(quant_shape_to_byte_shape(shape, kind))))
    return values, tensors


class _Header:
    """The header of a file, read here because the package ``gguf`` takes half a minute for a large vocabulary."""

    def __init__(self, file: Path):
        if file.stat().st_size < len(MAGIC):
            raise ValueError("it is empty")
        self.content = np.memmap(file, np.uint8, "r")
        self._place = 0

    def read(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
        """Values by name; name, shape, type and offset of each tensor; and the offset of the header's end."""
        if (begin := bytes(self.content[: len(MAGIC)])) != MAGIC:
            raise ValueError(f"it begins with {begin!r} and not with {MAGIC!r}")
        self._place = len(MAGIC)
        try:
            version, count, described = self._next("IQQ")
            if version not in VERSIONS:
                raise ValueError(f"its version is {version}, and only versions {VERSIONS} can be read")
            values = {self._string(): self._value(*self._next("I")) for _ in range(described)}
            return values, [self._tensor() for _ in range(count)], self._place
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise ValueError("its header is cut short or damaged") from error

    def _next(self, letters: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{letters}", self.content.data, self._place)
        self._place += struct.calcsize(f"<{letters}")
        return found

    def _string(self) -> str:
        (length,) = self._next("Q")
        return self._next(f"{length}s")[0].decode()  # type: ignore[no-any-return]

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._next(FIXED[kind])[0]
        kind, count = self._next("IQ")
        if count <= LIST:
            return [self._value(kind) for _ in range(count)]
        if kind in FIXED:
            self._place += count * struct.calcsize(FIXED[kind])
            return None
        for _ in range(count):  # for example a vocabulary; its elements are skipped
            if kind == STRING:
                (length,) = self._next("Q")
                self._place += length
            else:
                self._value(kind)
        return None

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (dims,) = self._string(), self._next("I")
        shape = self._next(f"{dims}Q")
        kind, place = self._next("IQ")
        return name, tuple(reversed(shape)), kind, place
