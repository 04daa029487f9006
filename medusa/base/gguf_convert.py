"""Conversion of a GGUF file to the directory of a base; a few tensors are in memory at a time."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from medusa.base.gguf_config import ends_of
from medusa.base.gguf_reading import MTP, Reading, Source, tensors_of
from medusa.base.gguf_tensors import SLICE, Stored, stored_tensors
from medusa.base.gguf_tokenizer import read_tokenizer
from medusa.clock import cores
from medusa.cpu.gguf_types import KINDS
from medusa.cpu.packed import DTYPE, PANEL, Packed, held_bits

WEIGHTS = "packed-{:05}.safetensors"
"""Files of weights, numbered."""
WORKERS = 4
"""Most threads that make tensors."""
SHARD = 2**30
"""Bytes of weights after which a new file begins."""


def convert(file: Path, directory: Path) -> str:
    """Convert a GGUF file to the directory of a base.

    Args:
        file: The GGUF file.
        directory: The new directory; it must not exist. After an error it is incomplete.

    Returns:
        A description of the weights.

    Raises:
        OSError: The directory cannot be written.
        ValueError: The file is damaged, its family is not known, or the package ``gguf`` is missing.
    """
    with _one_error(file):
        reading = Reading(file)
        tokenizer = read_tokenizer(file)
    reading.outline.generation_config.eos_token_id = ends_of(
        reading.header, tokenizer, reading.outline.config.vocab_size
    )
    directory.mkdir()
    _save_config(reading.outline, directory)
    tokenizer.save_pretrained(directory)
    with _one_thread():
        kinds = _write(directory, _made(file, reading.tensors()))
        with _one_error(file):
            layer = reading.mtp()
    if layer:
        _save(layer, directory / MTP, {})
    told = f"{', '.join(kinds)} kept packed" if kinds else "of types that are expanded"
    return f"weights of the GGUF file {file.name} ({told}), as {str(DTYPE).removeprefix('torch.')}"


def save_expanded(model: PreTrainedModel, directory: Path) -> None:
    """Write a model in transformers' format; its own ``save_pretrained`` writes in the first process only."""
    model.config.architectures = [type(model).__name__]
    _save_config(model, directory)
    tensors = {name: tensor.contiguous() for name, tensor in tensors_of(model).items()}
    _save(tensors, directory / "model.safetensors", {"format": "pt"})


def _save_config(model: PreTrainedModel, directory: Path) -> None:
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def read_config(file: Path) -> PretrainedConfig:
    """The config that ``convert`` writes.

    Raises:
        ValueError: See ``convert``.
    """
    with _one_error(file):
        return Reading(file).outline.config


def held_bytes(file: Path) -> int:
    """About how many bytes the weights take when ``convert`` packs them, if all tensors of known types can be packed.

    Raises:
        ValueError: See ``convert``.
    """
    with _one_error(file):
        found = stored_tensors(file)[1]
    kinds = {one.name: one.kind for one in found}

    def bits(one: Stored) -> float:
        joined = one.name.replace("_up_exps", "_gate_exps"), one.name.replace("_gate_exps", "_up_exps")
        packs = one.kind in KINDS and all(kinds.get(name, one.kind) == one.kind for name in joined)
        return held_bits(one.kind) if packs else 8 * DTYPE.itemsize

    return int(sum(prod(one.shape) * bits(one) for one in found) / 8)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: operations are many and small, and on a busy machine threads that wait take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _one_error(file: Path) -> Iterator[None]:
    """Turn the many kinds of errors of damaged files into one."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"GGUF file ({file}) cannot be read: {error}; pip install gguf") from error
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(f"GGUF file ({file}) cannot be read: {reason}; give another file or base") from error


def _made(file: Path, sources: Iterable[Source]) -> Iterator[tuple[str, Tensor | Packed, str]]:
    """Name, tensor and type of each of the model's tensors; the type is "" if it is not packed."""
    waiting = deque[Future[tuple[str, Tensor | Packed, str]]]()
    count = min(WORKERS, cores())
    # Each thread has a number of torch's threads of its own, which would wait for each other.
    with _one_error(file), ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as workers:
        for source in sources:
            waiting.append(workers.submit(_make, source))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _make(source: Source) -> tuple[str, Tensor | Packed, str]:
    packed = _pack(source)
    return (source.name, packed, source.stored[0].kind) if packed else (source.name, source.values(), "")


def _pack(source: Source) -> Packed | None:
    """Pack a matrix [O, I], or matrices of experts [E, O, I] as one [E * O, I]; None if they cannot be packed.

    Its first ``SLICE`` numbers are compared with those that the package ``gguf`` reads.
    """
    rows, inputs, kinds = source.rows, source.shape[-1:].numel(), {one.kind for one in source.stored}
    if rows is None or len(kinds) != 1 or not kinds <= KINDS.keys():
        return None
    if len(rows) * inputs != source.shape.numel() or any(one.shape[-1] != inputs for one in source.stored):
        return None
    (kind,), blocks = kinds, torch.cat([one.blocks().flatten(0, -2) for one in source.stored])
    step = max(1, SLICE // inputs // PANEL) * PANEL  # because packing needs a multiple of its memory
    parts = [Packed.of(blocks[some], kind) for some in rows.split(step)]
    compared = len(parts) if kind == "MXFP4" and (blocks.unflatten(-1, (-1, 17))[..., 0] < 2).any() else 1
    for part, some in zip(parts[:compared], rows.split(step), strict=False):
        read = replace(source.stored[0], shape=(len(some), inputs), data=blocks[some].numpy()).numbers()
        if not torch.equal(part.expand(), torch.from_numpy(read).to(DTYPE)):
            return None
    return Packed.joined(parts).for_here()


def _write(directory: Path, found: Iterable[tuple[str, Tensor | Packed, str]]) -> list[str]:
    """Write the tensors in order, into files of about ``SHARD`` bytes; returns the types of packed tensors."""
    tensors, packings, kinds = dict[str, Tensor](), dict[str, tuple[int, ...]](), set[str]()
    number = size = 0

    def end() -> None:
        nonlocal size, number
        _save(tensors, directory / WEIGHTS.format(number), {"packings": json.dumps(packings)})
        number, size = number + 1, 0
        tensors.clear()
        packings.clear()

    for name, one, kind in found:
        if isinstance(one, Packed):
            packings[name] = (one.packing, one.outputs, one.inputs, one.runs)
            kinds.add(kind)
        tensors[name] = one.parts if isinstance(one, Packed) else one.contiguous()
        size += tensors[name].nbytes
        if size >= SHARD:
            end()
    end()
    return sorted(kinds)


def _save(tensors: dict[str, Tensor], path: Path, told: dict[str, str]) -> None:
    try:
        save_file(tensors, path, told)
    except (OSError, SafetensorError) as error:
        raise OSError(f"weights ({path}) cannot be written: {error}; free disk space, or set XDG_CACHE_HOME") from error
