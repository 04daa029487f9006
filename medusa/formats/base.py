"""What a format of stored heads is: recognise a directory, read heads from it, write heads to one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.base.model import BaseModel
from medusa.files import peek_object, read_object
from medusa.heads import DraftHeads, HeadsConfig

CONFIG = "config.json"
"""In every format: what the heads are."""


@dataclass(frozen=True)
class Export:
    """What an export writes: the heads, and what some formats ship of the base."""

    heads: DraftHeads
    """Written in the dtype they have. Their config names the base as it is found from here: a path or a Hub id."""
    base: BaseModel | None = None
    """Its output layer and tokenizer are shipped by formats whose readers do not take them from the base itself."""
    provenance: Mapping[str, Any] | None = None
    """Where the heads come from, for formats that hold it."""


class Format(ABC):
    """One way to store heads in a directory; stateless.

    Attributes:
        name: Its key in ``medusa.formats.FORMATS``.
        summary: One line: who reads it.
        ships_base: Whether it ships parts of the base, so that ``Export.base`` is needed.
        architectures: Of heads that it can hold, on bases that training left as they were; None = all heads there are.
    """

    name: str
    summary: str
    ships_base: bool = False
    architectures: tuple[str, ...] | None = None

    @abstractmethod
    def matches(self, directory: Path) -> bool:
        """Whether a directory is of this format, by file names and config keys; damaged files are no error here."""

    @abstractmethod
    def read_config(self, directory: Path) -> HeadsConfig:
        """The shape of the heads, without reading their weights.

        Where tensors tell another number of heads than ``config.json``, tensors are right, and a warning is logged.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is damaged, or files do not fit each other.
        """

    @abstractmethod
    def load(self, directory: Path) -> DraftHeads:
        """The heads, on the CPU and in the dtype they are stored in.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is damaged, or files do not fit each other.
        """

    def obstacle(self, config: HeadsConfig) -> str:
        """Why heads of this shape cannot be stored in this format, a clause without remedy; "" = they can."""
        if self.architectures is not None and config.architecture not in self.architectures:
            return f"cannot hold heads of the architecture {config.architecture!r}"
        if self.architectures is not None and config.base_adapter:
            return "cannot hold the adapter by which joint training (Medusa-2) changed the base of these heads"
        return ""

    @abstractmethod
    def write(self, export: Export, directory: Path) -> None:
        """Write heads without an obstacle into a directory that is there; every file appears whole or not at all.

        Raises:
            ValueError: The base that the format ships is not given.
        """


def read_config_file(directory: Path) -> dict[str, Any]:
    """The object in ``config.json``.

    Raises:
        FileNotFoundError: There is no such directory, or no such file in it.
        ValueError: It is damaged.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"heads directory ({directory}) does not exist; train heads first or give another path")
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"heads directory ({directory}) has no {CONFIG}; give the folder that training wrote")
    return read_object(path, "heads config", "export the heads again")


def peek_config(directory: Path) -> dict[str, Any]:
    """The object in ``config.json``; an empty one where that cannot be read."""
    return peek_object(directory / CONFIG) or {}
