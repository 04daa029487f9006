"""Files of named tensors: safetensors, and pickles of older tools if they hold only tensors."""

import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.files import replace_file

# Errors of torch's unpickler for files that are not a state dict.
DAMAGE = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError,
    TypeError, ValueError, pickle.UnpicklingError, struct.error,
)  # fmt: skip


def stored_files(directory: Path, written: str, old: str) -> list[Path]:
    """A directory's files of tensors: all safetensors, else an old pickle; without any, the one that should be there.

    Args:
        directory: The directory.
        written: Name of the file that is written.
        old: Name of the pickle.
    """
    pickled = directory / old
    return sorted(directory.glob("*.safetensors")) or [pickled if pickled.is_file() else directory / written]


def read_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Read the tensors of one or more files, on the CPU; large ones are mapped and only read when they are used.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or is a pickle with other objects than tensors, which could run code.
    """
    tensors: dict[str, Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"heads directory ({path.parent}) has no {path.name}; copy the folder again")
        tensors |= _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"heads file ({path}) is damaged: {error}; copy or train it again") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    remedy = "copy it again, or get these heads as .safetensors"
    try:
        mapped = zipfile.is_zipfile(path)  # before torch 1.6 files had another form
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except DAMAGE as error:  # its text has several lines, and one of them explains unsafe loading
        if "GLOBAL" in str(error):
            raise ValueError(
                f"heads file ({path}) is a pickle of more than tensors and could run code: it is not loaded; get these"
                " heads as .safetensors"
            ) from error
        raise ValueError(f"heads file ({path}) is damaged: torch.save wrote no such file; {remedy}") from error
    named = isinstance(state, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    )
    if not named:
        raise ValueError(f"heads file ({path}) does not hold tensors by name; {remedy}")
    return dict(state)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, or as a pickle if the name ends in .pt; the file appears whole or not at all.

    Args:
        path: The file.
        tensors: Tensors by name; none may share memory with another.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if path.suffix == ".pt":
        replace_file(path, lambda beside: torch.save(plain, beside))
    else:
        replace_file(path, lambda beside: _save(plain, beside))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file with the usual permissions of new files; safetensors itself makes it readable only by its owner."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(
            f"heads file ({path}) cannot be written: {error}; make room, or give another directory"
        ) from error
    path.chmod(mode)
