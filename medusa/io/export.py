"""Heads from one format to another, with a model card beside them."""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from medusa.base import smollm2
from medusa.base.model import BaseModel
from medusa.base.names import resolve_base
from medusa.base.output import state_size
from medusa.files import peek_object, replace_file
from medusa.formats import Export, export_heads, load_heads, load_provenance, named_format, refusal
from medusa.formats.native import ADAPTER
from medusa.heads import HeadsConfig
from medusa.io.card import write_card
from medusa.io.hub import fetch_heads
from medusa.io.published import published, published_file

REPORT = "report.json"
"""What the demo writes into the run directory, beside the heads' own."""


def export(
    heads: str | Path,
    format_name: str,
    out: str | Path,
    base: str = "",
    dtype: torch.dtype | None = None,
    repo: str = "",
) -> Export:
    """Write heads in another format.

    What they say of their training comes without places on this disk and command lines (`published`); the base that a
    config names stays a path where it is one, since whoever serves the export here needs it.

    Args:
        heads: A directory in any format, or a Hub id.
        format_name: Key in ``FORMATS``.
        out: Directory; a new one, or one that holds heads of this format, which are replaced.
        base: The base that the export names; "" = the one that the heads name.
        dtype: Of the written weights; None = as they are stored.
        repo: Where on the Hub the heads will be found, for the card; "" = not there.

    Returns:
        What was written.

    Raises:
        ValueError: There is no such format, it cannot hold these heads, they are of another base, or ``out`` holds
            something else.
        OSError: The heads or their base are not found.
    """
    target, out = named_format(format_name), Path(out)
    source = fetch_heads(heads)
    if out.is_dir() and any(out.iterdir()) and not target.matches(out):
        raise ValueError(f"directory ({out}) holds something else than {format_name!r} heads; give a new directory")
    loaded = load_heads(source, dtype=dtype)
    loaded = loaded.with_config(base=_base_name(base, loaded.config.base, source))
    if reason := refusal(format_name, loaded.config):
        raise ValueError(reason)  # before a large base is loaded
    _check_size(loaded.config)
    made = Export(
        loaded,
        _load_base(loaded.config.base, dtype) if target.ships_base and loaded.config.base else None,
        published(load_provenance(source)),
    )
    export_heads(made, format_name, out)
    _clean(out)
    write_card(out, loaded.config, format_name, repo, made.provenance, _report(source, made.provenance))
    return made


def _clean(out: Path) -> None:
    """Take private words out of the files that no program needs them in."""
    for path in (out / ADAPTER / "adapter_config.json", out / "tokenizer_config.json"):
        if path.is_file() and isinstance(text := published_file(path), bytes):
            replace_file(path, partial(Path.write_bytes, data=text))


def _check_size(config: HeadsConfig) -> None:
    """Refuse a base of other sizes; one on the Hub is not asked: an export needs no network."""
    if config.base and Path(config.base).is_dir() and (base := _base_config(config.base)):
        sizes = base.get_text_config()
        config.check_fit(state_size(sizes), sizes.vocab_size, config.base)


def _load_base(name: str, dtype: torch.dtype | None) -> BaseModel:
    """The base as it is stored where no dtype is asked for: to compute in, a CPU would take another than float16."""
    if dtype is None and (config := _base_config(name)):
        dtype = config.dtype
    return BaseModel.load(name, dtype, "cpu")


def _base_config(name: str) -> PretrainedConfig | None:
    """None where it cannot be read: who needs more of the base says so in our words."""
    with contextlib.suppress(OSError, ValueError):
        config: PretrainedConfig = AutoConfig.from_pretrained(smollm2.locate(name))
        return config
    return None


def _base_name(given: str, own: str, heads: Path) -> str:
    """The base as it is found from here: a path or a Hub id."""
    if given:
        return resolve_base(given)
    return resolve_base(own, heads) if own else ""


def _report(heads: Path, provenance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The demo's report of these heads; one of heads that were trained before them there is left out."""
    report = peek_object(heads.resolve().parent / REPORT)
    figures = (provenance or {}).get("figures")
    known = isinstance(figures, dict) and figures.get("heldout_top1")
    return report if report and known and report.get("head_top1") == known else None
