"""``medusa-serve --dry-run``: what a device's memory would hold, from a config alone."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.arguments import memory_size

if TYPE_CHECKING:
    from medusa.budget.plan import Limits

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "name_or_path": "smollm2",
    "dtype": "bfloat16",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""The published config, for machines that do not have the model: planning downloads nothing."""


def add_plan_options(plan: "argparse._ArgumentGroup") -> None:
    """Options of a plan."""
    plan.add_argument(
        "--dry-run",
        action="store_true",
        help="load no weights: print what the memory would hold and how many requests fit, and exit; --base may be a"
        " config.json too (default: off)",
    )
    plan.add_argument(
        "--device-memory",
        type=memory_size,
        metavar="SIZE",
        help="of the GPU to plan for, as 80GB or 24GiB (default: a CPU with this machine's memory)",
    )


def show_plan(args: argparse.Namespace) -> int:
    """Print the plan for the base, the heads and the limits that the flags of ``medusa-serve`` name.

    Returns:
        Exit status 0.

    Raises:
        OSError: The heads or the config are not there.
        ValueError: The config cannot be read, or the base does not fit.
    """
    import torch

    from medusa.budget.plan import make_plan
    from medusa.budget.shape import read_shape
    from serve.engine import MEMORY

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    shape = read_shape(_config(args.base), dtype, args.int8)
    on_gpu = args.device_memory is not None
    memory = args.device_memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits, share, recorded = _limits(args, shape.itemsize), 1.0 if on_gpu else MEMORY, on_gpu and not args.no_graph
    plan = make_plan(shape, limits, memory, share, recorded, args.cache_tokens)
    sys.stdout.write(f"{plan.table()}\n")
    if on_gpu and args.cache_tokens is None:
        taken = f"without the flag the server takes {MEMORY:.0%} of what is free once the model is loaded"
        sys.stdout.write(f"  --cache-tokens {plan.positions} uses all of it; {taken}\n")
    return 0


def _limits(args: argparse.Namespace, itemsize: int) -> "Limits":
    """The engine's limits, with the heads that are named or ship with the base."""
    import torch

    from data import shipped_heads
    from medusa.budget.plan import Limits
    from medusa.budget.policy import SIZES
    from medusa.cache import BLOCK
    from medusa.engine.row import TREES
    from medusa.formats import find_format
    from medusa.heads import build_heads

    limits = Limits(args.max_batch, max(SIZES), args.prefill_rows, BLOCK, TREES)
    directory = args.heads or shipped_heads(args.base)
    if not directory:
        return limits
    config = find_format(directory).read_config(Path(directory))
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in build_heads(config).parameters())
    return replace(
        limits,
        head_bytes=weights * itemsize,
        feature_layers=len(config.feature_layers),
        draft_vocabulary=config.output_size,
    )


def _config(base: str | None) -> Any:
    """The config of a base by its name, or of a config.json."""
    from transformers import AutoConfig

    from data import resolve_base_name
    from medusa.base import smollm2

    if base is None:
        raise ValueError("--dry-run plans for a base; name it with --base: a directory, a config.json or a Hub id")
    name = resolve_base_name(base)
    if name == smollm2.HUB_ID:
        return AutoConfig.for_model(**SMOLLM2)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config of the base ({name}) cannot be read: {reason}; give its config.json") from error
