"""The interface of formats of stored heads: recognise a directory, read heads from it, write heads to it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from medusa.base.model import BaseModel
from medusa.files import peek_object, read_object
from medusa.heads import DraftHeads, HeadsConfig

CONFIG = "config.json"
"""The file that describes the heads, in every format."""


@dataclass(frozen=True)
class Export:
    """The content of an export: the heads, and the parts of the base that some formats include."""

    heads: DraftHeads
    """The heads, written in their dtype. Their config names the base as it is found from here: a path or a Hub id."""
    base: BaseModel | None = None
    """The base, whose output layer and tokenizer some formats include; their readers do not take them from the base."""
    provenance: Mapping[str, Any] | None = None
    """The origin of the heads, for formats that store it."""


class Format(ABC):
    """One way to store heads in a directory; stateless.

    Attributes:
        name: Its key in ``medusa.formats.FORMATS``.
        summary: One line: the programs that read it.
        architectures: Supported architectures of heads, on bases that training did not change; None = all heads.
    """

    name: str
    summary: str
    architectures: tuple[str, ...] | None = None

    @abstractmethod
    def matches(self, directory: Path) -> bool:
        """Whether a directory has this format, by file names and config keys; damaged files raise no error here."""

    @abstractmethod
    def read_config(self, directory: Path) -> HeadsConfig:
        """The shape of the heads, without reading their weights.

        If the tensors and ``config.json`` differ in the number of heads, the tensors are right and a warning is logged.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is damaged, or the files do not match.
        """

    @abstractmethod
    def load(self, directory: Path) -> DraftHeads:
        """Load the heads, on the CPU and in their stored dtype.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is damaged, or the files do not match.
        """

    def ships_base(self, config: HeadsConfig) -> bool:
        """Whether heads of this shape are stored with parts of the base, so that ``Export.base`` is needed."""
        return False

    def obstacle(self, config: HeadsConfig) -> str:
        """Why heads of this shape cannot be stored in this format, as a clause without remedy; "" = they can."""
        if self.architectures is not None and config.architecture not in self.architectures:
            return f"cannot hold heads of the architecture {config.architecture!r}"
        if self.architectures is not None and config.base_adapter:
            return "cannot hold the adapter by which joint training (Medusa-2) changed the base of these heads"
        return ""

    def base_obstacle(self, base: PretrainedConfig) -> str:
        """Why readers of this format refuse a base with this config, as a clause without remedy; "" = not known."""
        return ""

    @abstractmethod
    def write(self, export: Export, directory: Path) -> None:
        """Write heads that have no ``obstacle`` into an existing directory; every file appears whole or not at all.

        Raises:
            ValueError: The format includes parts of the base, and none is given.
        """


def read_config_file(directory: Path) -> dict[str, Any]:
    """The object in ``config.json``.

    Raises:
        FileNotFoundError: There is no such directory, or no such file in it.
        ValueError: The file is damaged.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"heads directory ({directory}) does not exist; train heads first or give another path")
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"heads directory ({directory}) has no {CONFIG}; give the folder that training wrote")
    return read_object(path, "heads config", "export the heads again")


def peek_config(directory: Path) -> dict[str, Any]:
    """The object in ``config.json``; an empty one if it cannot be read."""
    return peek_object(directory / CONFIG) or {}
