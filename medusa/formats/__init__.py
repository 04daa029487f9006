"""Formats of stored heads: all can be loaded, and each can be written if it supports the heads."""

from pathlib import Path

import torch

from medusa.formats.assistant import Assistant
from medusa.formats.base import CONFIG, Export, Format, read_config_file
from medusa.formats.custom_generate import CustomGenerate
from medusa.formats.dflash import Dflash
from medusa.formats.dspark import Dspark
from medusa.formats.eagle3 import Eagle3
from medusa.formats.native import Native, load_provenance, save_heads
from medusa.formats.original import Lorax, MedusaV1, MedusaV2, Tgi
from medusa.formats.speculators import Speculators
from medusa.formats.vllm import Universal, Vllm
from medusa.heads import DraftHeads, HeadsConfig

_MEDUSA = (MedusaV1(), MedusaV2(), Tgi(), Lorax(), Vllm(), Universal())
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (Native(), *_MEDUSA, CustomGenerate(), Eagle3(), Speculators(), Dspark(), Dflash(), Assistant())
}
"""Formats by name; a directory that matches several counts as the first of them."""

__all__ = [
    "FORMATS",
    "Export",
    "Format",
    "export_heads",
    "find_format",
    "holders",
    "load_heads",
    "load_provenance",
    "named_format",
    "refusal",
    "save_heads",
]


def find_format(directory: str | Path) -> Format:
    """The format of a directory of heads.

    Raises:
        FileNotFoundError: There is no such directory, or no heads in it.
        ValueError: The format is not known.
    """
    directory = Path(directory)
    read_config_file(directory)
    for candidate in FORMATS.values():
        if candidate.matches(directory):
            return candidate
    held = ", ".join(sorted(path.name for path in directory.iterdir())[:8])
    raise ValueError(
        f"heads directory ({directory}; it holds {held}) is not of a known format: {', '.join(FORMATS)}; give a folder"
        " of heads"
    )


def load_heads(directory: str | Path, dtype: torch.dtype | None = torch.float32) -> DraftHeads:
    """Read heads of any format.

    Args:
        directory: Directory of the heads.
        dtype: Dtype of computation; None = the stored dtype.

    Raises:
        FileNotFoundError: The directory or one of its files is missing.
        ValueError: The format is not known, or the files are damaged.
    """
    return find_format(directory).load(Path(directory)).to(dtype=dtype).eval()


def export_heads(export: Export, name: str, directory: str | Path) -> Path:
    """Write heads in the format of this name; returns the directory, which is created if missing.

    Raises:
        ValueError: There is no such format, it does not support these heads, it needs the base and none is given, or
            the directory holds heads of another format.
    """
    if reason := refusal(name, export.heads.config):
        raise ValueError(reason)
    target, directory = named_format(name), Path(directory)
    if (directory / CONFIG).exists() and not target.matches(directory):
        raise ValueError(f"directory ({directory}) holds a {CONFIG} that is not {name!r}; give a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    target.write(export, directory)
    return directory


def named_format(name: str) -> Format:
    """The format of this name.

    Raises:
        ValueError: There is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"format ({name!r}) is not known; choose one of: {', '.join(FORMATS)}")
    return FORMATS[name]


def holders(config: HeadsConfig) -> list[str]:
    """Names of the formats that support heads of this shape."""
    return [name for name, each in FORMATS.items() if not each.obstacle(config)]


def refusal(name: str, config: HeadsConfig) -> str:
    """Why this format does not support heads of this shape, and which formats do; "" = it does."""
    if reason := named_format(name).obstacle(config):
        return f"format {name!r} {reason}; formats that can hold these heads: {', '.join(holders(config))}"
    return ""
