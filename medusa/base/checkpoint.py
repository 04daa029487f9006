"""Loading a base's checkpoint: its location, the dtype and device of the weights, and how they are packed."""

import gc
import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from medusa.base import gguf, groupwise, smollm2
from medusa.base.adapter import apply_adapter
from medusa.base.names import full_name
from medusa.base.plain import load_plain
from medusa.base.tensor_parallel import divide
from medusa.clock import limit_threads, machine_memory
from medusa.cpu.experts import use_experts
from medusa.cpu.int8 import round_linears
from medusa.cpu.native import DTYPES, available, packing_pays, use_kernels
from medusa.cpu.packed import DTYPE as PACKED_DTYPE
from medusa.files import cache_directory
from medusa.gpu.packed import objection, pays

logger = logging.getLogger(__name__)


EXPANDED_SHARE = 0.5
"""Largest share of the machine's memory for expanded weights, if packed weights are slower."""
REPLACED = ("causal_conv1d_fn", "chunk_gated_delta_rule", "mamba_chunk_scan_combined")
"""Functions of recurrent layers in whose place ours decode, by the names that transformers' advice has for them."""


class Checkpoint(NamedTuple):
    """A base as read from the disk.

    Attributes:
        model: The transformers model, on its device.
        tokenizer: Its tokenizer.
        name: Path or Hub id.
        source: The kind of the weights, if it is special; see ``BaseModel``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: str


def read_checkpoint(
    name: str | Path,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    pack: bool,
    int8: bool,
    load_options: Mapping[str, Any] | None,
    adapter: str | Path,
) -> Checkpoint:
    """Load model and tokenizer; see ``BaseModel.load`` for arguments and errors."""
    if dtype not in (None, torch.float64, *DTYPES):
        raise ValueError(f"dtype ({dtype!r}) is not one of a base; give torch.bfloat16, float16 or float32, or None")
    device = usable_device(device)
    if device.type == "cpu":
        limit_threads()
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_of_use)
    name = full_name(str(name))
    path, options = smollm2.locate(name), dict(load_options or {})
    divided = "tp_plan" in options
    spread = divided or "device_map" in options
    if int8 and not divided and (device.type != "cpu" or spread):
        where = "spread over devices" if spread else f"on {device}"
        raise ValueError(f"int8 is for one CPU and the base is {where}; leave int8 out, or pass device=cpu alone")
    if divided:
        device, options = divide(path, device, options, {"int8": int8, "adapter": adapter})
    try:
        with _garbage_kept():
            config = AutoConfig.from_pretrained(path)
            on_cpu = device.type == "cpu"
            held = groupwise.reads(config) if on_cpu else groupwise.packs(config, dtype)
            held = (held or gguf.holds(path, True)) and not options
            keep = held and pack and not adapter and (int8 or _stays_packed(path, device))
            grouped = groupwise.reads(config) and not options and (on_cpu or keep)
            quantised = not grouped and ("quantization_config" in options or hasattr(config, "quantization_config"))
            if dtype is None and grouped and keep:
                dtype = groupwise.packed_dtype(config)
                if dtype != config.dtype:
                    logger.info("dtype %s: packed weights need it, another dtype would expand them", PACKED_DTYPE)
            dtype = dtype or choose_dtype(config.dtype, device, pack and not quantised and not spread)
            if quantised and device.type == "cuda":
                options.setdefault("device_map", {"": device})  # loaded quantised weights cannot be moved
            packed = keep and dtype == PACKED_DTYPE
            if grouped:
                model = groupwise.load(path, config, dtype, packed, device)
            elif gguf.holds(path, packed) and not options and not is_deepspeed_zero3_enabled():
                model = gguf.load(path, dtype, not packed, device)
            else:
                model = load_plain(gguf.expanded(path), dtype, options)
            if not quantised and not spread:
                model = model.to(device)
            tokenizer = AutoTokenizer.from_pretrained(path)
    except gguf.CacheError:
        raise
    except pickle.UnpicklingError as error:
        told = "a file that is damaged, or a pickle of more than tensors"
        raise ValueError(f"base ({name}) has {told}; download it again, or give its weights as safetensors") from error
    except StrictDataclassError as error:
        raise ValueError(f"base ({name}) has an odd config: {' '.join(str(error).split())}; {_remedy(path)}") from error
    except SafetensorError as error:
        other = "copy or download its files again"
        raise ValueError(f"base ({name}) has damaged weights ({error}); {_remedy(path, other)}") from error
    except (OSError, EOFError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ValueError(f"base ({name}) cannot be loaded: {error}; {_remedy(path)}") from error
    if adapter:
        model = apply_adapter(model, adapter, merge=not quantised)
    if int8:
        round_linears(model, output=model.get_output_embeddings())
    if pack and device.type == "cpu" and not spread:
        use_kernels(model)
        use_experts(model)
    return Checkpoint(model, tokenizer, name, smollm2.source(path) or groupwise.describe(config))


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a message is other than the advice to install fast kernels that decoding would not call.

    They need a GPU: so on a CPU they would not help the plain passes of training either.
    """
    return not record.getMessage().startswith(tuple(f"`{name}` is falling back" for name in REPLACED))


def _remedy(path: str, other: str = "give another path, or a Hub id") -> str:
    return f"remove {path}, which is made again" if Path(path).is_relative_to(cache_directory()) else other


def _stays_packed(path: str, device: torch.device) -> bool:
    """Whether weights stay packed: if that is faster, or if expanded weights would fill most of the memory."""
    if device.type != "cpu":
        return _stays_packed_on(device, gguf.expanded_bytes(path))
    if packing_pays() or not available():
        return packing_pays()
    expanded, memory = gguf.expanded_bytes(path), machine_memory()
    if expanded <= EXPANDED_SHARE * memory:
        if expanded:
            logger.info("weights are expanded, which is faster on this CPU; int8 (LOSSY) would keep them packed")
        return False
    logger.info("weights stay packed (slower here): expanded they would take %d of %d bytes", expanded, memory)
    return True


def _stays_packed_on(gpu: torch.device, expanded: int) -> bool:
    """The same on a GPU, where checkpoints of groups (``expanded`` = 0) stay packed at any speed."""
    if reason := objection(gpu) if gpu.type == "cuda" else "there are no kernels for them":
        logger.warning("weights are expanded and take more memory, since on %s %s", gpu, reason)
        return False
    if pays(gpu) or not 0 < expanded <= EXPANDED_SHARE * torch.cuda.mem_get_info(gpu)[1]:
        return True
    logger.info("weights are expanded, which is faster on %s", gpu)
    return False


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Pause garbage collection: while a large vocabulary is read, each collection visits all its objects again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device with this name; None = the GPU if there is one, otherwise the CPU.

    Raises:
        ValueError: The device is unknown, cannot compute, or does not exist here.
    """
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device ({device}) is not known to torch; pass cpu, cuda or cuda:N") from error
    if device.type == "meta":
        raise ValueError(f"device ({device}) cannot compute; pass cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device ({device}) is not usable: torch sees no GPU here; pass device=cpu")
    return device


def choose_dtype(config_dtype: torch.dtype | None, device: torch.device, pack: bool = False) -> torch.dtype:
    """Choose the dtype of a base.

    It is the checkpoint's dtype if our kernels compute the linear layers (``pack``), because they are equally fast in
    every dtype. Otherwise, and in training, a CPU uses bfloat16 in place of float16, and float32 if it has no bfloat16
    instructions. ``medusa.loading.dtype`` chooses again for layers that the kernels do not fully compute.
    """
    dtype = config_dtype or torch.float32
    if pack and device.type == "cpu" and dtype in DTYPES and available():
        return dtype
    if device.type == "cpu" and dtype == torch.float16:
        logger.info("dtype bfloat16: CPUs compute slowly in float16")
        dtype = torch.bfloat16
    if device.type == "cpu" and dtype == torch.bfloat16 and not _cpu_has_bfloat16():
        logger.info("dtype float32: this CPU has no bfloat16 instructions")
        return torch.float32
    return dtype


def _cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions for matrix products in bfloat16, by torch's own checks if it has them."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(probe() for name in probes if (probe := getattr(torch.cpu, name, None)))
