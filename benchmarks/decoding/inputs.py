"""What the flags of ``medusa-bench`` name: bases, heads, prompts."""

import argparse
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import choose_device
from benchmarks.step.shapes import as_loaded, random_base, random_heads, shape_config
from data import resolve_base_name
from data.prompts import file_prompts
from medusa import BaseModel, DraftHeads, MedusaModel
from medusa.loading.self_test import choose_decoding
from serve.demo.questions import questions


def given_dtype(options: argparse.Namespace) -> torch.dtype | None:
    """The type of the weights, None = auto."""
    return None if options.dtype == "auto" else getattr(torch, options.dtype)


def trained(options: argparse.Namespace, **how: Any) -> MedusaModel:
    """Trained heads with their base."""
    disable_progress_bar()
    return MedusaModel.from_pretrained(
        options.heads,
        base=resolve_base_name(options.base) if options.base else None,
        dtype=given_dtype(options),
        device=None if options.device == "auto" else options.device,
        **how,
    )


def check_trees(base: BaseModel, name: str | None = None) -> None:
    """Refuse a base that verifies no trees.

    Raises:
        ValueError: It does not.
    """
    if base.decoding != "tree":
        raise ValueError(f"base ({name or base.name}) does not verify trees, see above; name another with --base")


def named_prompts(options: argparse.Namespace, model: MedusaModel, count: int) -> list[list[int]]:
    """Token ids of the first ``count`` prompts, or of fewer where there are fewer."""
    if options.prompts == "heldout":
        return questions(model, None, count)[0]
    return file_prompts(model, options.prompts)[:count]


def with_random_heads(options: argparse.Namespace) -> tuple[BaseModel, DraftHeads]:
    """A base and random heads for it, prepared for decoding.

    Raises:
        ValueError: The flags do not go together, or the base cannot do what they ask for.
    """
    if options.int8 and getattr(options, "baseline", False):
        raise ValueError("--baseline compares engines with the same weights, --int8 rounds ours; leave one of them out")
    disable_progress_bar()
    device, dtype = choose_device(options.device), given_dtype(options)
    if options.shape:
        config = shape_config(options.shape)
        base = random_base(config, dtype, device, options.seed, options.attention, options.int8)
    else:
        how: dict[str, Any] = {"pack": True, "int8": options.int8, "attention": options.attention}
        base = BaseModel.load(resolve_base_name(options.base), dtype=dtype, device=device, **how)
        base = choose_decoding(base)
        check_trees(base, options.base)
    drafted = min(options.draft_vocab, base.vocab_size)
    shape = (options.architecture, options.num_heads, options.seed, options.feature_layers, drafted)
    heads = random_heads(base, *shape)
    return as_loaded(base, heads)


def describe(options: argparse.Namespace, base: BaseModel) -> dict[str, Any]:
    """How steps with random heads are made, as reports say it."""
    heads = f"{options.num_heads} {options.architecture}, random"
    heads += f", drafting {options.draft_vocab} tokens" if options.draft_vocab else ""
    heads += f", reading {options.feature_layers} layers" if options.feature_layers else ""
    return {"heads": heads, "attention": base.attention.name, "int8": base.int8, "fused": base.fused}
