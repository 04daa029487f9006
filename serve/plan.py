"""``medusa serve --dry-run``: plans a device's memory from a config alone."""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa.base.names import full_name, shipped_heads
from medusa.budget.plan import Limits, make_plan
from medusa.budget.shape import read_shape
from medusa.data.arguments import memory_size
from medusa.serve.flags import flag, from_flags
from medusa.serve.settings import EngineSettings

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "name_or_path": "smollm2", "dtype": "bfloat16", "vocab_size": 49_152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
"""The published config of smollm2, for machines without the model: planning downloads nothing."""


@dataclass(frozen=True)
class DryRun:
    """Flags of planning."""

    dry_run: bool = flag(
        False,
        "load no weights: print what the memory would hold and how many requests fit, and exit; --base may be a"
        " config.json too",
    )
    device_memory: int | None = flag(
        None,
        "of the GPU to plan for, as 80GB or 24GiB (default: a CPU with this machine's memory)",
        memory_size,
        "SIZE",
    )


def show_plan(args: argparse.Namespace) -> int:
    """Print the plan for the base, the heads and the limits that the flags of ``medusa serve`` name.

    Returns:
        Exit status 0.

    Raises:
        OSError: The heads or the config do not exist.
        ValueError: The config cannot be read, or the base does not fit.
    """
    import torch

    from medusa.base import gguf_convert, gguf_names, groupwise, mx_experts
    from medusa.base.merged import plain_base
    from medusa.clock import machine_memory
    from medusa.cpu.native import packing_pays
    from medusa.cpu.packed import DTYPE
    from medusa.serve.engine import MEMORY

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    below = plain_base(args.base) if args.base else None
    file = gguf_names.find(full_name(below), download=False) if below else None
    config = gguf_convert.read_config(file) if file else _config(below)
    merged = below != args.base  # with an adapter, in plain weights
    if merged and hasattr(config, "quantization_config"):
        del config.quantization_config
    shape = read_shape(config, dtype, args.int8)
    on_gpu = args.device_memory is not None
    pays = not shape.expert_weights if on_gpu else args.int8 or packing_pays()  # experts are expanded on a GPU
    packs = not merged and pays
    held = gguf_convert.held_bytes(file) if file and packs and dtype in (None, DTYPE) else 0
    if not on_gpu and groupwise.reads(config):
        bits = groupwise.held_bits(config, dtype) if packs else None
        shape = replace(shape, bits=bits or 8 * (1 if args.int8 else shape.itemsize))
        if bits and groupwise.of_experts(config):
            held = mx_experts.held_bytes(shape.weights, shape.expert_weights)
    if held:
        shape = replace(shape, held=held, bits=round(8 * held / shape.weights))
    memory = args.device_memory or machine_memory()
    limits = engine_limits(from_flags(EngineSettings, args), recorded=on_gpu and not args.no_graph)
    limits = replace(limits, head_bytes=shape.itemsize * _head_weights(args.heads or shipped_heads(args.base)))
    cache = args.cache_tokens or (None if on_gpu else int(MEMORY * memory / shape.cached_bytes))
    plan = make_plan(shape, limits, memory, cache)
    sys.stdout.write(f"{plan.table()}\n")
    if on_gpu and args.cache_tokens is None:
        taken = f"without the flag the server takes {MEMORY:.0%} of what is free once the model is loaded"
        sys.stdout.write(f"  --cache-tokens {plan.positions} uses all of it; {taken}\n")
    return 0


def engine_limits(settings: EngineSettings, recorded: bool = True) -> Limits:
    """Limits of the engine with these settings, without heads.

    Args:
        settings: The server's settings.
        recorded: Whether steps are recorded as graphs (on a GPU).
    """
    from medusa.budget.policy import SIZES
    from medusa.cache import BLOCK
    from medusa.engine.config import EngineConfig
    from medusa.engine.graph import KEPT_BUCKETS

    buckets = KEPT_BUCKETS + 1 if recorded else 0  # one more is in use
    reserve = EngineConfig().tree_reserve
    return Limits(settings.max_batch, max(SIZES), settings.prefill_rows, BLOCK, reserve, buckets)


def _head_weights(directory: str | None) -> int:
    """Number of weights of the heads in a directory."""
    import torch

    from medusa.formats import find_format
    from medusa.heads import build_heads

    if not directory:
        return 0
    with torch.device("meta"):
        heads = build_heads(find_format(directory).read_config(Path(directory)))
    return sum(weight.numel() for weight in heads.parameters())


def _config(base: str | None) -> Any:
    """The config of a base by its name, or of a config.json; nothing is downloaded."""
    from transformers import AutoConfig

    from medusa.base.names import HUB_ID

    if base is None:
        raise ValueError("--dry-run plans for a base; name it with --base: a directory, a config.json or a Hub id")
    name = full_name(base)
    if name == HUB_ID:
        return AutoConfig.for_model(**SMOLLM2)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config of the base ({name}) cannot be read: {reason}; give its config.json") from error
