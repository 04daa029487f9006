"""What every report of ``medusa-bench`` says beside its figures, and where it goes."""

import argparse
import importlib.metadata
import logging
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.decoding.tables import Report, show
from medusa.files import write_json

logger = logging.getLogger(__name__)


def publish(options: argparse.Namespace, device: torch.device, dtype: torch.dtype, figures: Report) -> None:
    """Write the report, show it, draw it, as the flags ask for.

    Args:
        options: The flags.
        device: Where it was measured.
        dtype: Of the weights.
        figures: The report's own part.
    """
    report = {
        "kind": options.command,
        "base": options.shape or options.base,
        "weights": "random" if options.shape else "real",
        "dtype": str(dtype).removeprefix("torch."),
        **environment(device, options.words),
        **figures,
    }
    if options.json:
        write_json(Path(options.json), report)
    show(report)
    if options.picture:
        try:
            from benchmarks.decoding.picture import draw
        except ImportError as error:  # on a bare machine the figures count
            logger.warning("no picture: %s", error)
        else:
            draw(report, options.picture)


def environment(device: torch.device, words: Sequence[str]) -> Report:
    """The command, the machine and the versions that figures belong to."""
    cuda = device.type == "cuda"
    packages = ("torch", "transformers", "triton")
    return {
        "command": shlex.join(["medusa-bench", *words]),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": None if cuda else torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
