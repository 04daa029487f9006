"""``python -m medusa.benchmarks.peers.copies DIRECTORY NAME...``: copies of a base for other engines.

The copies have the same weights. A name is a base ("smollm2", "embedded", a directory) or a shape ("llama-1b"), which
gets random weights.
"""

import filecmp
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from medusa.base import smollm2
from medusa.base.names import EMBEDDED, full_name, is_embedded
from medusa.benchmarks.step.shapes import SHAPES, random_model, shape_config
from medusa.data import load_tokenizer
from medusa.heads import HeadsConfig

logger = logging.getLogger(__name__)

CHECKPOINT, OPENVINO, GGUF = "checkpoint", "openvino", "model.gguf"
"""Content of a copy's directory: the base in the formats of transformers, OpenVINO and llama.cpp."""
EAGLE3_LAYERS = 3
"""Layers of the base that a plain EAGLE-3 draft reads."""


def copies_of(environments: Path, base: str) -> Path:
    """The directory of the copies of a base or shape.

    Raises:
        ValueError: There are none, or they have other weights.
    """
    directory = directory_of(environments, base)
    again = f"benchmarks/peers/setup.sh {environments} {base}"
    if not directory.is_dir():
        raise ValueError(f"peers ({environments}) have no copies of {base}; make them: {again}")
    if base not in SHAPES:
        checkpoint = Path(smollm2.locate(full_name(base))).resolve()
        names = sorted(file.name for file in checkpoint.glob("*.safetensors"))
        copied = (directory / CHECKPOINT).resolve()
        made = directory.stat().st_mtime
        if copied == checkpoint:
            same = all((checkpoint / name).stat().st_mtime <= made for name in names)
        else:
            same = filecmp.cmpfiles(copied, checkpoint, names, shallow=False)[0] == names
        if not same:
            raise ValueError(f"copies ({directory}) are of other weights than {checkpoint}; remove them, run {again}")
    return directory


def directory_of(environments: Path, base: str) -> Path:
    """The directory for copies of a base or shape, by its name or by ``BaseModel.name``."""
    if is_embedded(base):
        return environments / "models" / EMBEDDED
    return environments / "models" / Path(full_name(base)).name


def copy_base(environments: Path, name: str) -> Path:
    """Make missing copies of a base; returns their directory.

    If the base is not a Llama, llama.cpp's file is left out, and a message is logged.

    Raises:
        subprocess.CalledProcessError: OpenVINO's tool has failed; its messages are above.
    """
    from medusa.benchmarks.peers.gguf_file import write_gguf  # its package is not installed everywhere

    directory = directory_of(environments, name)
    checkpoint = directory / CHECKPOINT
    directory.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        if name in SHAPES:
            part = directory / f"{CHECKPOINT}.part"
            random_model(shape_config(name), torch.bfloat16, torch.device("cpu")).save_pretrained(part)
            load_tokenizer("smollm2").save_pretrained(part)  # engines need one, but only token ids are sent
            part.rename(checkpoint)
        else:
            checkpoint.symlink_to(Path(smollm2.locate(full_name(name))).resolve())
    if not (directory / OPENVINO).exists():
        tool, part = environments / "openvino/bin/optimum-cli", directory / f"{OPENVINO}.part"
        words = [str(tool), "export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
        subprocess.run([*words, "--weight-format", "fp16", str(part)], check=True)
        part.rename(directory / OPENVINO)
    if not (directory / GGUF).exists():
        try:
            write_gguf(checkpoint, directory / GGUF)
        except ValueError as error:
            logger.warning("no copy for llama.cpp: %s", error)
    return directory


def openvino_reads(config: HeadsConfig) -> bool:
    """Whether OpenVINO GenAI supports such heads: a plain EAGLE-3 draft without the norms of later versions."""
    layer = config.layer
    return bool(
        config.architecture == "attention" and layer and len(config.feature_layers) == EAGLE3_LAYERS
        and not (layer.norm_features or layer.norm_output or layer.norm_heads or layer.norm_before_residual)
        and not layer.attention_bias
    )  # fmt: skip


def copy_draft(environments: Path, base: str, draft: Path, target: Path) -> Path:
    """Convert an EAGLE-3 draft for OpenVINO GenAI; returns its directory.

    Args:
        environments, base: See ``copies_of``.
        draft: Directory of the draft in the format ``eagle3``.
        target: The new directory; it must not exist.

    Raises:
        ValueError: See ``copies_of``.
        subprocess.CalledProcessError: OpenVINO's converter has failed; its messages are above.
    """
    copy = copies_of(environments, base) / OPENVINO
    python, script = environments / "openvino/bin/python", Path(__file__).parent / "engines/openvino_draft.py"
    subprocess.run([str(python), str(script), str(draft), str(target)], check=True, stdout=subprocess.DEVNULL)
    shutil.copy(copy / "generation_config.json", target)  # it has the end-of-sequence tokens
    return target


if __name__ == "__main__":
    for each in sys.argv[2:]:
        copy_base(Path(sys.argv[1]).resolve(), each)
