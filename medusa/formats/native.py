"""This project's own format: ``config.json``, ``heads.safetensors``, and provenance as JSON if it is known.

Heads of joint training (Medusa-2) also have the adapter of the base, in ``adapter/``.
"""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medusa.base import names
from medusa.files import FORMAT_VERSION, header, peek_object, write_json
from medusa.formats.base import CONFIG, Export, Format, peek_config, read_config_file
from medusa.formats.tensor_files import read_tensors, write_tensors
from medusa.heads import DraftHeads, HeadsConfig, build_heads

WEIGHTS = "heads.safetensors"
PROVENANCE = "provenance.json"
ADAPTER = "adapter"
BASE_PATH = "base_path"
"""Key in ``config.json``: the path of a local base when the heads were written; see ``save_heads``."""
FORMAT = header("heads")["format"]


def save_heads(heads: DraftHeads, directory: str | Path, provenance: Mapping[str, Any] | None = None) -> Path:
    """Write heads; every file appears whole under its name or not at all.

    A base in a local directory is stored by its path relative to ``directory`` and by its absolute path, so both can
    move together, or the heads alone. The base that ships with this package is stored by its name. An adapter is
    copied.

    Args:
        heads: The heads; their tensors are stored in their dtype.
        directory: Created if missing.
        provenance: The origin of the heads (recipe, versions, figures); None removes the provenance of earlier heads
            in the directory.

    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = dataclasses.asdict(heads.config)
    if heads.config.base and names.is_at(Path(heads.config.base)):
        config |= _local(Path(heads.config.base), directory)
    if heads.config.base_adapter:
        config["base_adapter"] = ADAPTER
        if Path(heads.config.base_adapter).resolve() != (directory / ADAPTER).resolve():
            shutil.copytree(heads.config.base_adapter, directory / ADAPTER, dirs_exist_ok=True)
    (directory / PROVENANCE).unlink(missing_ok=True)
    write_tensors(directory / WEIGHTS, heads.state_dict())
    if provenance is not None:
        write_json(directory / PROVENANCE, provenance)
    write_json(directory / CONFIG, header("heads") | config)
    return directory


class Native(Format):
    """This project's own format; it supports all heads."""

    name = "native"
    summary = "this project, in training and decoding"

    def matches(self, directory: Path) -> bool:
        """See ``Format``; decided by a key of the config. A directory with code for transformers has another format."""
        return peek_config(directory).get("format") == FORMAT and not (directory / "custom_generate").is_dir()

    def read_config(self, directory: Path) -> HeadsConfig:
        """See ``Format``; the name of an adapter becomes a path that can be opened."""
        path, values = directory / CONFIG, read_config_file(directory)
        if values.pop("format", None) != FORMAT:
            raise ValueError(
                f"heads config ({path}) is not of the format {FORMAT!r}; give a folder that training wrote"
            )
        if (version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise ValueError(f"heads format version ({version}) is not {FORMAT_VERSION}; update this package")
        place = values.pop(BASE_PATH, "")
        try:
            config = HeadsConfig(**values)
        except TypeError as error:
            raise ValueError(f"heads config ({path}) has wrong keys: {error}; export the heads again") from error
        lost = names.is_path(config.base) and not names.is_at(directory / config.base)
        if lost and place and names.is_at(Path(str(place))):
            config = dataclasses.replace(config, base=str(place))
        if config.base_adapter:
            config = dataclasses.replace(config, base_adapter=_adapter_in(directory, config.base_adapter))
        return config

    def load(self, directory: Path) -> DraftHeads:
        """See ``Format``: loads heads that ``save_heads`` wrote."""
        config, path = self.read_config(directory), directory / WEIGHTS
        # Copies, because tensors of a file may be at addresses that vector instructions read slowly.
        return fill_heads(config, {name: tensor.clone() for name, tensor in read_tensors([path]).items()}, path)

    def write(self, export: Export, directory: Path) -> None:
        """See ``Format``: writes everything of the heads, and of the base only an adapter."""
        if not export.heads.config.base_adapter:
            shutil.rmtree(directory / ADAPTER, ignore_errors=True)
        save_heads(export.heads, directory, export.provenance)


def _local(base: Path, directory: Path) -> dict[str, str]:
    """Keys of the config for a base on this machine."""
    if names.is_embedded(base):
        return {"base": names.EMBEDDED}
    return {"base": os.path.relpath(base, directory.resolve()), BASE_PATH: str(base.resolve())}


def _adapter_in(directory: Path, name: str) -> str:
    """The path of an adapter, which must be in the directory: an export copies it, and a push publishes the copy."""
    adapter = (directory / name).resolve()
    if not adapter.is_relative_to(directory.resolve()):
        raise ValueError(
            f"heads config ({directory / CONFIG}) names an adapter outside of the heads' directory ({name}); copy the"
            " folder again"
        )
    return str(adapter)


def fill_heads(config: HeadsConfig, state: Mapping[str, torch.Tensor], path: Path) -> DraftHeads:
    """Make heads with these weights, each in its dtype.

    Args:
        config: The shape of the heads.
        state: Names and tensors as in the heads' ``state_dict``.
        path: The file of the weights, for errors.

    Raises:
        ValueError: The weights do not match the shape.
    """
    with torch.device("meta"):
        heads = build_heads(config)
    try:
        heads.load_state_dict(state, assign=True)
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"heads file ({path}) does not fit its {CONFIG}: {why}; copy the folder again") from error
    if heads.draft_ids is not None and not _are_tokens(heads.draft_ids, config.vocab_size):
        raise ValueError(
            f"heads file ({path}) is damaged: draft_ids are not ascending token ids below {config.vocab_size}; copy or"
            " train it again"
        )
    return heads


def _are_tokens(ids: torch.Tensor, vocab_size: int) -> bool:
    """Whether token ids are ascending and in the vocabulary."""
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (ids.diff() > 0).all())


def load_provenance(directory: str | Path) -> dict[str, Any] | None:
    """The stored origin of heads; None if it is missing or damaged, which is no error because no program needs it."""
    return peek_object(Path(directory) / PROVENANCE)
