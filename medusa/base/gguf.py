"""GGUF files as bases: each is converted once, through transformers and ``gguf``, to the layout of the kernels.

The result is a directory with config, tokenizer and ``WEIGHTS``. A matrix stays packed (``medusa.cpu.packed``) if the
kernels support its type and its rows are rows of the file; all other tensors are stored expanded.
"""

import fcntl
import glob
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

from medusa.base.gguf_names import find
from medusa.files import cache_directory, sweep, write_json

logger = logging.getLogger(__name__)

WEIGHTS = "packed*.safetensors"
"""Pattern of the files with packed weights in a directory."""
LAYOUT = 10
"""Version of the directory layout; directories of other versions are not touched."""
EXPANDED = "-expanded"
"""Suffix of the directory with expanded weights; see ``expanded``."""
SOURCE = "source.json"
"""File that describes the kind of the weights."""


def locate(name: str) -> str:
    """Convert the GGUF file of a base, if that was not done yet; returns its directory, or any other name unchanged.

    Raises:
        OSError: The file cannot be obtained, or the directory cannot be written.
        ValueError: The file cannot be read, or the name matches several files (``medusa.base.gguf_names``).
    """
    file = find(name)
    if file is None:
        return name
    stat = file.stat()
    same = hashlib.sha256(f"{LAYOUT} {file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = cache_directory() / "bases" / f"{file.stem}-{same}"

    def make(model: Path) -> None:
        from medusa.base.gguf_convert import convert

        logger.info("base %s: reading the GGUF file and keeping it in %s, once", file.name, directory)
        source = convert(file, model)
        if (now := file.stat()).st_mtime_ns != stat.st_mtime_ns or now.st_size != stat.st_size:
            raise ValueError(f"GGUF file ({file}) changed while it was being read; load it again when it is complete")
        write_json(model / SOURCE, {"name": str(file), "source": source})

    keep(directory, make)
    return str(directory)


class CacheError(OSError):
    """The cache cannot be written."""


def keep(directory: Path, make: Callable[[Path], None]) -> None:
    """Make a directory if it does not exist: one process makes it completely or not at all, and the others wait.

    Args:
        directory: A directory in the cache.
        make: Makes it at a given path, in a temporary directory.

    Raises:
        CacheError: The cache cannot be written.
    """
    if directory.exists():
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        opened = directory.with_name(f"{directory.name}.lock").open("w")
    except OSError as error:
        why = f"cannot be written ({error.strerror}); set XDG_CACHE_HOME to a directory with room"
        raise CacheError(f"cache ({directory.parent}) {why}") from error
    with opened as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.exists():
            return
        # Left by a run that was killed; nobody uses them, because we hold the lock.
        sweep(directory.parent, f"{glob.escape(directory.name)}-*", age=0)
        with TemporaryDirectory(prefix=f"{directory.name}-", dir=directory.parent) as beside:
            model = Path(beside) / "model"
            make(model)
            model.replace(directory)


def holds(directory: str | Path, packed: bool) -> bool:
    """Whether ``load`` reads this directory: it has packed weights, and they are wanted or it has no others."""
    directory = Path(directory)
    return any(directory.glob(WEIGHTS)) and (packed or not (directory / "model.safetensors").is_file())


def expanded_bytes(directory: str | Path) -> int:
    """Bytes that the packed weights of a directory would take in bfloat16."""
    packings = [one for shard in Path(directory).glob(WEIGHTS) for one in _packings(shard).values()]
    return sum(2 * outputs * inputs for _, outputs, inputs, _ in packings)


def expanded(directory: str) -> str:
    """A directory that transformers reads: this one, or if its weights are packed only, one that is made from it."""
    if not holds(directory, packed=False):
        return directory
    from medusa.base.gguf_convert import save_expanded
    from medusa.cpu.packed import DTYPE

    whole = Path(f"{directory}{EXPANDED}")

    def make(beside: Path) -> None:
        logger.info("base %s: writing expanded weights to %s, once, since transformers needs them", directory, whole)
        beside.mkdir()
        save_expanded(load(directory, DTYPE, expand=True), beside)

    keep(whole, make)
    return str(whole)


def load(
    directory: str | Path, dtype: "torch.dtype", expand: bool, device: "torch.device | None" = None
) -> "PreTrainedModel":
    """Load the model from a directory that ``convert`` has made, on the CPU.

    Args:
        directory: The directory.
        dtype: Dtype of the model; packed layers are bfloat16.
        expand: Convert packed layers to plain ones: for training, for other dtypes, or if the kernels do not run.
        device: Where packed layers compute, and already are; None = the CPU.
    """
    from safetensors.torch import load_file
    from torch import Tensor, nn
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    from medusa.base.gguf_reading import tensors_of
    from medusa.base.packing import CPU, packed_embedding, packed_linear, set_packed, stays_packed
    from medusa.cpu.experts import in_own_order, shape_in_order
    from medusa.cpu.packed import Packed

    directory = Path(directory)
    config = AutoConfig.from_pretrained(directory)
    with no_init_weights():  # memory that is never written is not used
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors, packings = dict[str, Tensor](), dict[str, list[int]]()
    for shard in directory.glob(WEIGHTS):
        packings |= _packings(shard)
        tensors |= load_file(shard)
    if missing := tensors_of(model).keys() - tensors.keys():
        raise ValueError(f"converted weights ({directory}) lack {min(missing)}; remove that directory and load again")
    for name in tensors.keys() - packings.keys():
        path, _, own = name.rpartition(".")
        _set(model, name, in_own_order(model.get_submodule(path), own, tensors[name]).to(dtype))
    kept, device = dict[str, Packed](), device or CPU
    for name, packing in packings.items():
        (path, _, own), packed = name.rpartition("."), Packed(tensors[name], *packing)
        module = model.get_submodule(path)
        scale = getattr(module, "embed_scale", None)
        if expand or not stays_packed(module, packed, device):
            whole = packed.expand().view(shape_in_order(module, own))
            _set(model, name, in_own_order(module, own, whole).to(dtype))
        elif isinstance(module, nn.Embedding):
            scale = scale.to(dtype) if isinstance(scale, Tensor) else None
            model.set_submodule(path, packed_embedding(packed, scale, device))
        else:
            kept[name] = packed
    set_packed(model, kept, device)
    embeddings = model.get_input_embeddings()
    if config.tie_word_embeddings and hasattr(embeddings, "packed"):
        model.set_output_embeddings(packed_linear(embeddings.packed, None, device))
    elif config.tie_word_embeddings:
        model.tie_weights()
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _packings(shard: Path) -> dict[str, list[int]]:
    """Packing, outputs, inputs and runs of each packed tensor in a file (``medusa.cpu.packed.Packed``)."""
    from safetensors import safe_open

    with safe_open(shard, "pt") as file:
        found: dict[str, list[int]] = json.loads(file.metadata()["packings"])
    return found


def _set(model: "nn.Module", name: str, tensor: "Tensor") -> None:
    from torch import nn

    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own in dict(module.named_buffers(recurse=False)):
        module.register_buffer(own, tensor)
    else:
        setattr(module, own, nn.Parameter(tensor, requires_grad=False))
