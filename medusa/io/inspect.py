"""Describes a directory of heads and its problems (``medusa export inspect``)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

from medusa.base.names import resolve_base
from medusa.formats import FORMATS, find_format
from medusa.formats.tensor_files import read_tensors
from medusa.heads import HeadsConfig

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = ("*.safetensors", "*.pt", "pytorch_model.bin")


def inspect_heads(directory: Path) -> dict[str, Any]:
    """Describe a directory as far as possible, even if it is damaged.

    Returns:
        A report: ``files`` and ``tensors`` always; ``format``, ``heads`` and ``exports`` (for every format why it
        cannot hold the heads; "" = it can) as far as they can be read; ``problems``, sentences.
    """
    problems: list[str] = []
    report: dict[str, Any] = {"kind": "inspect", "directory": str(directory), "format": None}
    with _warnings_in(problems):
        try:
            form = find_format(directory)
            report |= {"format": form.name, "read_by": form.summary}
            config = form.load(directory).config
            report |= {"heads": _describe(config)}
            report |= {"exports": {name: each.obstacle(config) for name, each in FORMATS.items()}}
            problems += _base_problems(config, directory)
        except (OSError, ValueError) as error:
            problems.append(str(error))
    tensors = _tensors(directory, problems)
    sizes = {path: path.stat().st_size for path in sorted(directory.rglob("*")) if path.is_file()}
    return report | {
        "tensors": tensors,
        "parameters": sum(tensor["parameters"] for tensor in tensors),
        "files": {path.relative_to(directory).as_posix(): size for path, size in sizes.items()},
        "problems": list(dict.fromkeys(problems)),
    }


def _describe(config: HeadsConfig) -> dict[str, Any]:
    return {
        "base": config.base or None,
        "base_adapter": config.base_adapter or None,
        "architecture": config.architecture,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "output_layer": "own" if config.own_lm_heads else "shared",
        "feature_layers": list(config.feature_layers),
        "draft_vocab_size": config.draft_vocab_size or None,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size or None,
    }


def _base_problems(config: HeadsConfig, directory: Path) -> list[str]:
    if config.base_adapter and not (Path(config.base_adapter) / ADAPTER_CONFIG).is_file():
        return [f"adapter ({config.base_adapter}) does not exist and the heads need it; copy the folder again"]
    if not config.base:
        return ["the heads do not name their base; give it with --base when you use them"]
    try:
        resolve_base(config.base, directory)
    except FileNotFoundError as error:
        return [str(error)]
    return []


def _tensors(directory: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Stored tensors of every file that can be read."""
    found = []
    for path in sorted(path for pattern in WEIGHTS for path in directory.glob(pattern)):
        try:
            tensors = read_tensors([path])
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        found += [
            {
                "file": path.name,
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "parameters": tensor.numel(),
            }
            for name, tensor in sorted(tensors.items())
        ]
        problems += [
            f"tensor {name} holds numbers that are not finite; train or copy the heads again"
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and not torch.isfinite(tensor).all()
        ]
    return found


@contextmanager
def _warnings_in(messages: list[str]) -> Iterator[None]:
    """Collect warnings of formats in a list instead of the log."""
    logger, handler = logging.getLogger("medusa.formats"), BufferingHandler(capacity=1000)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        messages += [record.getMessage() for record in handler.buffer]
        logger.removeHandler(handler)
        logger.propagate = True
