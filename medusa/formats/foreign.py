"""The common part of other engines' formats: plain Medusa heads, with one tensor per head and layer."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa.base.names import resolve_base
from medusa.formats.base import CONFIG, Export, Format, read_config_file
from medusa.formats.head_tensors import HeadTensors
from medusa.formats.native import fill_heads
from medusa.formats.tensor_files import read_tensors, write_tensors
from medusa.heads import DraftHeads, HeadsConfig

logger = logging.getLogger(__name__)

PICKLE = "medusa_lm_head.pt"
"""The file that the original writes; readers use it if there are no safetensors."""


class Foreign(Format):
    """Formats of plain Medusa heads, which are all read in the same way."""

    architectures = ("medusa",)

    def obstacle(self, config: HeadsConfig) -> str:
        """See ``Format``: the features that these engines do not support."""
        if reason := super().obstacle(config):
            return reason
        if config.feature_layers:
            return "cannot hold heads that read feature layers"
        return "cannot hold a draft vocabulary" if config.draft_vocab_size else ""

    def files(self, directory: Path) -> list[Path]:
        """The files with the heads' tensors: all safetensors, otherwise the original's pickle, which may be missing."""
        return sorted(directory.glob("*.safetensors")) or [directory / PICKLE]

    def read_config(self, directory: Path) -> HeadsConfig:
        """See ``Format``: read from the tensors' shapes, and all else from ``config.json``."""
        return self._read(directory)[0]

    def load(self, directory: Path) -> DraftHeads:
        """See ``Format``: reads the heads from all files."""
        config, tensors = self._read(directory)
        return fill_heads(config, tensors.state(), self.files(directory)[0])

    def write_weights(self, directory: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write tensors by file name, and remove files of earlier heads that readers would use."""
        for name, tensors in files.items():
            write_tensors(directory / name, tensors)
        for path in [*self.files(directory), directory / PICKLE]:
            if path.name not in files:
                path.unlink(missing_ok=True)

    def _read(self, directory: Path) -> tuple[HeadsConfig, HeadTensors]:
        values, tensors = read_config_file(directory), HeadTensors(directory)
        for name, tensor in read_tensors(self.files(directory)).items():
            tensors.add(name, tensor)
        if values.get("original_lm_head"):
            tensors.share_output()
        tensors.check()
        return _config(tensors, values, directory), tensors


def _config(tensors: HeadTensors, values: Mapping[str, Any], directory: Path) -> HeadsConfig:
    """The shape of the heads: from the tensors, and if they do not tell it, from the config."""
    for keys, counted in (
        (("medusa_num_heads", "num_heads"), tensors.num_heads),
        (("medusa_num_layers", "num_hidden_layers"), tensors.num_layers),
        (("hidden_size",), tensors.hidden_size),
    ):
        for key in keys:
            if values.get(key, counted) != counted:
                logger.warning(
                    "heads config (%s) says %s %s, but the tensors hold %d and are used",
                    directory / CONFIG, key, values[key], counted,
                )  # fmt: skip
    draft_vocab_size = 0 if tensors.token_map is None else len(tensors.token_map)
    rows = len(tensors.all_outputs[0]) if tensors.all_outputs else 0
    return HeadsConfig(
        hidden_size=tensors.hidden_size,
        vocab_size=rows if rows > draft_vocab_size else values.get("vocab_size") or 0,
        num_heads=tensors.num_heads,
        num_layers=tensors.num_layers,
        own_lm_heads=bool(tensors.outputs),
        base=str(values.get("base_model_name_or_path") or ""),
        draft_vocab_size=draft_vocab_size,
    )


def shape_values(export: Export) -> dict[str, Any]:
    """Config keys that all formats have: the name of the base, and the sizes.

    Raises:
        FileNotFoundError: The heads name a directory that does not exist.
        ValueError: The heads name no base, or belong to another one.
    """
    config, base = export.heads.config, export.base
    if base is not None:
        config.check_fit(base.hidden_size, base.vocab_size, base.name)
    values = {
        "base_model_name_or_path": _base_name(export),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size or (base.vocab_size if base else 0),
    }
    return {key: value for key, value in values.items() if value}


def _base_name(export: Export) -> str:
    """The name by which engines find the base; a path that does not exist is replaced by that of the loaded base."""
    name, base = export.heads.config.base, export.base
    if not name and base is None:
        raise ValueError("heads name no base and other engines need one; give one: a directory or a Hub id")
    try:
        return resolve_base(name or base.name)  # type: ignore[union-attr]
    except FileNotFoundError:
        if base is None:
            raise
        return resolve_base(base.name)
