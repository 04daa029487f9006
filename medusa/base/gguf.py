"""GGUF files as bases: read once through transformers and ``gguf``, and kept as the kernels want them.

What a file becomes is a directory with config, tokenizer and ``WEIGHTS``. A matrix whose type the kernels know stays
packed there (``medusa.cpu.packed``), once its expansion was found equal to what transformers makes of it; all others
are kept expanded.
"""

import fcntl
import glob
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from medusa.cpu.packed import Packed

from medusa.files import cache_directory, sweep, write_json

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
WEIGHTS = "packed.safetensors"
SOURCE = "source.json"
"""What the weights are."""
DTYPE = "bfloat16"
"""torch's name for the numbers that packed weights stand for."""


def locate(name: str) -> str:
    """The directory that a GGUF file has become, now or earlier; any other name as it is.

    Raises:
        ValueError: The file cannot be read.
    """
    file = Path(name)
    if file.suffix != SUFFIX or not file.is_file():
        return name
    stat = file.stat()
    same = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = cache_directory() / "bases" / f"{file.stem}-{same}"

    def make(model: Path) -> None:
        logger.info("base %s: reading the GGUF file and keeping it in %s, once", file.name, directory)
        source = convert(file, model)
        write_json(model / SOURCE, {"name": str(file), "source": source})

    keep(directory, make)
    return str(directory)


def keep(directory: Path, make: Callable[[Path], None]) -> None:
    """Have a directory: where it is not there, one process makes it, whole or not at all, and the others wait.

    Args:
        directory: In the cache.
        make: Makes it under another name, in a directory of its own that goes at the end.
    """
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.exists():
            return
        # Of a run that was killed: the lock is ours.
        sweep(directory.parent, f"{glob.escape(directory.name)}-*", age=0)
        with TemporaryDirectory(prefix=f"{directory.name}-", dir=directory.parent) as beside:
            model = Path(beside) / "model"
            make(model)
            model.replace(directory)


def convert(file: Path, directory: Path, expanded: bool = False) -> str:
    """Make the directory of a GGUF file.

    Args:
        file: The file.
        directory: It must not exist.
        expanded: Write the expanded model there too, for those who read no packed weights.

    Returns:
        What the weights are, in words.

    Raises:
        ValueError: It is no GGUF file, transformers cannot read its family, or there is no package ``gguf``.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from medusa.cpu.packed import Packed

    how = {"dtype": getattr(torch, DTYPE), "quantization_config": GgufConfig(dequantize=True)}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **how)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tensors, kinds = _pack(model, file)
    except ImportError as error:
        raise ValueError(f"GGUF file ({file}) cannot be read: {error}; pip install gguf") from error
    except Exception as error:  # readers of a damaged file fail in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"GGUF file ({file}) cannot be read: {reason}; give another file or base") from error
    directory.mkdir()
    if expanded:
        model.save_pretrained(directory)
    else:
        model.config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    parts = {name: one.parts if isinstance(one, Packed) else one.contiguous() for name, one in tensors.items()}
    packings = {name: (one.packing, one.outputs) for name, one in tensors.items() if isinstance(one, Packed)}
    save_file(parts, directory / WEIGHTS, {"packings": json.dumps(packings)})
    told = f"{', '.join(kinds)} kept packed" if kinds else "of types that are expanded"
    return f"weights of the GGUF file {file.name} ({told}), as {DTYPE}"


def _pack(model: "PreTrainedModel", file: Path) -> "tuple[dict[str, Tensor | Packed], list[str]]":
    """A model's tensors, packed where that is the same, and the types of those."""
    import torch
    from gguf import GGUFReader
    from torch import Tensor
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    from medusa.cpu.packed import KINDS, Packed

    tensors: dict[str, Tensor | Packed] = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys or ():
            tensors.pop(name, None)
    processor = TENSOR_PROCESSORS.get(model.config.model_type, TensorProcessor)(config=model.config.to_dict())
    names, kinds = get_gguf_hf_weights_map(model, processor), set[str]()
    for stored in GGUFReader(file).tensors:
        name, kind = names.get(stored.name, ""), stored.tensor_type.name
        expanded = tensors.get(name)
        if kind not in KINDS or not isinstance(expanded, Tensor) or expanded.dim() != 2:
            continue
        blocks = torch.from_numpy(stored.data.copy()).view(torch.uint8).view(len(expanded), -1)
        for rows in _orders(len(expanded), model.config):
            packed = Packed.of(blocks[rows], kind)
            if torch.equal(packed.expand(expanded.dtype), expanded):
                tensors[name] = packed
                kinds.add(kind)
                break
    return tensors, sorted(kinds)


def _orders(outputs: int, config: Any) -> "Iterator[Tensor]":
    """How rows may stand in the file: in order, or, in Llama's queries and keys, the halves of each head in turn."""
    import torch

    in_order = torch.arange(outputs)
    yield in_order
    for heads in {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1}:
        if outputs % (2 * heads) == 0:
            yield in_order.view(heads, -1, 2).transpose(1, 2).flatten()


def holds(directory: str | Path, packed: bool) -> bool:
    """Whether ``load`` reads a directory: it holds packed weights, and these are wanted or it has no others."""
    directory = Path(directory)
    return (directory / WEIGHTS).is_file() and (packed or not (directory / "model.safetensors").is_file())


def load(directory: str | Path, dtype: "torch.dtype", expand: bool) -> "PreTrainedModel":
    """The model of a directory that ``convert`` has made, on the CPU.

    Args:
        directory: It.
        dtype: Of the model; packed layers are of ``DTYPE``.
        expand: Make plain layers of packed ones: for training, for other dtypes, or where the kernels do not run.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    from medusa.cpu.packed import Packed, PackedLinear

    directory, own = Path(directory), getattr(torch, DTYPE)
    config = AutoConfig.from_pretrained(directory)
    with no_init_weights():  # memory that is never written costs nothing
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with safe_open(directory / WEIGHTS, "pt") as file:
        packings = json.loads(file.metadata()["packings"])
    tensors = load_file(directory / WEIGHTS)
    for name in tensors.keys() - packings.keys():
        _set(model, name, tensors[name].to(dtype))
    for name, packing in packings.items():
        path, packed = name.removesuffix(".weight"), Packed(tensors[name], *packing)
        module = model.get_submodule(path)
        if expand or not isinstance(module, nn.Linear):
            _set(model, name, packed.expand(own).to(dtype))
        else:
            model.set_submodule(path, PackedLinear(packed, own, module.bias))
        if not expand and config.tie_word_embeddings and module is model.get_input_embeddings():
            model.set_output_embeddings(PackedLinear(packed, own, weight=module.weight))
    if expand:
        model.tie_weights()
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _set(model: "nn.Module", name: str, tensor: "Tensor") -> None:
    from torch import nn

    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own in dict(module.named_buffers(recurse=False)):
        module.register_buffer(own, tensor)
    else:
        setattr(module, own, nn.Parameter(tensor, requires_grad=False))
