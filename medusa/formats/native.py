"""This project's own format: ``config.json``, ``heads.safetensors``; where known, provenance and calibration as JSON.

Heads that changed their base in training (Medusa-2) have its adapter beside them, in ``adapter/``.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from medusa.calibrate import Calibration
from medusa.files import replace_file, write_json
from medusa.heads import DraftHeads, HeadsConfig, build_heads

WEIGHTS = "heads.safetensors"
CONFIG = "config.json"
PROVENANCE = "provenance.json"
CALIBRATION = "calibration.json"
ADAPTER = "adapter"
FORMAT = "medusa-heads"
FORMAT_VERSION = 1


def save_heads(
    heads: DraftHeads,
    directory: str | Path,
    provenance: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
) -> Path:
    """Write heads, file by file; every file appears whole under its name or not at all.

    A base that is a local directory is stored relative to ``directory``: the two can move together. An adapter of the
    base is copied into it.

    Args:
        heads: The heads; their tensors are stored in the dtype they have.
        directory: Created if missing.
        provenance: Anything that tells where the heads come from (recipe, versions, figures).
        calibration: Of these heads; without one, one that other heads have left there is removed.

    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = dataclasses.asdict(heads.config)
    if heads.config.base and Path(heads.config.base).is_dir():
        config["base"] = os.path.relpath(heads.config.base, directory)
    if heads.config.base_adapter:
        config["base_adapter"] = ADAPTER
        if Path(heads.config.base_adapter).resolve() != (directory / ADAPTER).resolve():
            shutil.copytree(heads.config.base_adapter, directory / ADAPTER, dirs_exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    (directory / CALIBRATION).unlink(missing_ok=True)
    replace_file(directory / WEIGHTS, lambda path: save_file(state, path, metadata={"format": "pt"}))
    if provenance is not None:
        write_json(directory / PROVENANCE, provenance)
    if calibration is not None:
        calibration.save(directory / CALIBRATION)
    header = {"format": FORMAT, "format_version": FORMAT_VERSION}
    write_json(directory / CONFIG, header | config)
    return directory


def load_config(directory: str | Path) -> HeadsConfig:
    """Read and check ``config.json``; an adapter of the base becomes a path that can be opened.

    Raises:
        FileNotFoundError: No such directory, or no heads in it.
        ValueError: The file is not a config of this format.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"heads directory ({directory}) does not exist; train heads first or give another path")
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"heads directory ({directory}) has no {CONFIG}; give the folder that training wrote")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"heads config ({path}) is not valid JSON: {error}; export the heads again") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(f"heads config ({path}) is not of the format {FORMAT!r}; give a folder that training wrote")
    if (version := values.pop("format_version", None)) != FORMAT_VERSION:
        raise ValueError(f"heads format version ({version}) is not {FORMAT_VERSION}; update this package")
    try:
        config = HeadsConfig(**values)
    except TypeError as error:
        raise ValueError(f"heads config ({path}) has wrong keys: {error}; export the heads again") from error
    if config.base_adapter:
        config = dataclasses.replace(config, base_adapter=str((directory / config.base_adapter).resolve()))
    return config


def load_heads(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> DraftHeads:
    """Read heads written by ``save_heads``.

    Raises:
        FileNotFoundError: The directory or one of its files is missing.
        ValueError: The config or the weights are damaged or do not fit each other.
    """
    directory = Path(directory)
    config = load_config(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"heads directory ({directory}) has no {WEIGHTS}; copy the folder again")
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"heads file ({path}) is damaged: {error}; copy or train it again") from error
    heads = build_heads(config)
    try:
        heads.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"heads file ({path}) does not fit its {CONFIG}: {error}; copy the folder again") from error
    if heads.draft_ids is not None and not _are_tokens(heads.draft_ids, config.vocab_size):
        raise ValueError(
            f"heads file ({path}) is damaged: draft_ids are not ascending token ids below {config.vocab_size}; copy or"
            " train it again"
        )
    return heads.to(device=device, dtype=dtype).eval()


def _are_tokens(ids: torch.Tensor, vocab_size: int) -> bool:
    """Whether token ids ascend, and are in the vocabulary."""
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (ids.diff() > 0).all())


def load_calibration(directory: str | Path, config: HeadsConfig) -> Calibration | None:
    """The calibration of heads of this shape; None where there is none.

    Raises:
        ValueError: It is damaged or belongs to other heads.
    """
    path = Path(directory) / CALIBRATION
    if not path.is_file():
        return None
    calibration = Calibration.load(path)
    if len(calibration.samples) != config.num_heads:
        raise ValueError(
            f"calibration ({path}) is of {len(calibration.samples)} heads and there are {config.num_heads}; remove it,"
            " or copy it again"
        )
    return calibration
