"""``python -m benchmarks.peers.copies DIRECTORY NAME...``: copies of a base for other engines, with the same weights.

A name is that of a base ("smollm2", "embedded", a directory) or of a shape ("llama-1b"), which gets random weights.
"""

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.step.shapes import SHAPES, random_model, shape_config
from data import EMBEDDED, load_tokenizer, resolve_base_name
from medusa.base import smollm2

CHECKPOINT, OPENVINO, GGUF = "checkpoint", "openvino", "model.gguf"
"""What a copy's directory holds: the base as transformers has it, as OpenVINO has it, as llama.cpp has it."""


def directory_of(environments: Path, base: str) -> Path:
    """Where the copies of a base or shape are, by its name or by that of ``BaseModel.name``."""
    if resolve_base_name(base) == resolve_base_name(EMBEDDED):
        return environments / "models" / EMBEDDED
    return environments / "models" / Path(resolve_base_name(base)).name


def copy_base(environments: Path, name: str) -> Path:
    """Make what is missing of the copies of a base; returns their directory.

    Raises:
        ValueError: llama.cpp's file cannot be written for this architecture.
        subprocess.CalledProcessError: OpenVINO's tool has failed; its messages are above.
    """
    directory = directory_of(environments, name)
    checkpoint = directory / CHECKPOINT
    directory.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        if name in SHAPES:
            part = directory / f"{CHECKPOINT}.part"
            random_model(shape_config(name), torch.bfloat16, torch.device("cpu")).save_pretrained(part)
            load_tokenizer(smollm2.HUB_ID).save_pretrained(part)  # engines want one; only ids are sent
            part.rename(checkpoint)
        else:
            checkpoint.symlink_to(Path(smollm2.locate(resolve_base_name(name))).resolve())
    if not (directory / OPENVINO).exists():
        tool, part = environments / "openvino/bin/optimum-cli", directory / f"{OPENVINO}.part"
        words = [str(tool), "export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
        subprocess.run([*words, "--weight-format", "fp16", str(part)], check=True)
        part.rename(directory / OPENVINO)
    if not (directory / GGUF).exists():
        write_gguf(checkpoint, directory / GGUF)
    return directory


if __name__ == "__main__":
    for each in sys.argv[2:]:
        copy_base(Path(sys.argv[1]).resolve(), each)
