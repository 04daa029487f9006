"""Converts heads from one format to another, with a model card."""

import contextlib
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from medusa.base import smollm2
from medusa.base.model import BaseModel
from medusa.base.names import resolve_base
from medusa.base.on_hub import is_hub_id, kept_directory
from medusa.base.output import state_size
from medusa.files import peek_object, replace_file
from medusa.formats import Export, Format, export_heads, load_heads, load_provenance, named_format, refusal
from medusa.formats.native import ADAPTER
from medusa.heads import HeadsConfig
from medusa.io.card import write_card
from medusa.io.hub import fetch_heads
from medusa.io.published import published, published_file

REPORT = "report.json"
"""The demo's report in the run directory, beside the directory of the heads."""


def export(
    heads: str | Path,
    format_name: str,
    out: str | Path,
    base: str = "",
    dtype: torch.dtype | None = None,
    repo: str = "",
) -> Export:
    """Write heads in another format.

    Their provenance is written without local paths and command lines (`published`). A base that a config names by its
    path stays a path, because a server on this machine needs it.

    Args:
        heads: A directory in any format, or a Hub id.
        format_name: Key in ``FORMATS``.
        out: A new directory, which appears whole or not at all, or an empty one, or one with heads of this format,
            which are replaced.
        base: The base that the export names; "" = the one that the heads name.
        dtype: Dtype of the written weights; None = the stored dtype.
        repo: Hub id of the heads, for the card; "" = not on the Hub.

    Returns:
        The content that was written.

    Raises:
        ValueError: There is no such format, it does not support these heads or their base, they belong to another base,
            or ``out`` holds something else.
        OSError: The heads or their base are not found.
    """
    target, out = named_format(format_name), Path(out).resolve()
    source = fetch_heads(heads)
    if out.exists() and not out.is_dir():
        raise ValueError(f"out ({out}) is a file; give a directory")
    if out.is_dir() and any(out.iterdir()) and not target.matches(out):
        raise ValueError(f"directory ({out}) holds something else than {format_name!r} heads; give a new directory")
    loaded = load_heads(source, dtype=dtype)
    loaded = loaded.with_config(base=_base_name(base, loaded.config.base, source))
    if reason := refusal(format_name, loaded.config):
        raise ValueError(reason)  # before a large base is loaded
    _check_base(loaded.config, target)
    made = Export(
        loaded,
        _load_base(loaded.config.base, dtype) if target.ships_base(loaded.config) and loaded.config.base else None,
        published(load_provenance(source)),
    )
    known = out.is_dir()
    place = out if known else out.with_name(f"{out.name}.tmp")
    if not known:
        shutil.rmtree(place, ignore_errors=True)  # left by an export that was stopped
    export_heads(made, format_name, place)
    _clean(place)
    write_card(place, loaded.config, format_name, repo, made.provenance, _report(source, made.provenance))
    if not known:
        place.replace(out)
    return made


def _clean(out: Path) -> None:
    """Remove private values from files in which no program needs them."""
    for path in (out / ADAPTER / "adapter_config.json", out / "tokenizer_config.json"):
        if path.is_file() and isinstance(text := published_file(path), bytes):
            replace_file(path, partial(Path.write_bytes, data=text))


def _check_base(config: HeadsConfig, target: Format) -> None:
    """Raise an error if the base has other sizes, or if readers of the format refuse it.

    A base that is not on this machine is not checked, so an export needs no network.
    """
    base = _base_at_hand(config.base)
    if base is None:
        return
    sizes = base.get_text_config()
    config.check_fit(state_size(sizes), sizes.vocab_size, config.base)
    if reason := target.base_obstacle(base):
        raise ValueError(
            f"format {target.name!r} {reason}, and the base ({config.base}, {base.model_type}) is one; choose 'native'"
        )


def _load_base(name: str, dtype: torch.dtype | None) -> BaseModel:
    """Load the base; without a requested dtype in its stored dtype, since a CPU would convert float16 otherwise."""
    if dtype is None and (config := _base_config(name)):
        dtype = config.dtype
    return BaseModel.load(name, dtype, "cpu")


def _base_config(name: str) -> PretrainedConfig | None:
    """The base's config; None if it cannot be read, because code that needs the base raises its own error."""
    with contextlib.suppress(OSError, ValueError, StrictDataclassError):
        config: PretrainedConfig = AutoConfig.from_pretrained(smollm2.locate(name))
        return config
    return None


def _base_at_hand(name: str) -> PretrainedConfig | None:
    """The config of a base in a folder or in the Hub's cache; None = there is none."""
    if name and Path(name).is_dir():
        return _base_config(name)
    # Read as it is: what an adapter in the cache is for could be large, and elsewhere.
    directory = kept_directory(name) if is_hub_id(name) else ""
    with contextlib.suppress(OSError, ValueError, StrictDataclassError):
        config: PretrainedConfig | None = AutoConfig.from_pretrained(directory) if directory else None
        return config
    return None


def _base_name(given: str, own: str, heads: Path) -> str:
    """The name by which the base is found from here: a path or a Hub id."""
    if given:
        return resolve_base(given)
    return resolve_base(own, heads) if own else ""


def _report(heads: Path, provenance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The demo's report about these heads; None if it is about earlier heads in the same run directory."""
    report = peek_object(heads.resolve().parent / REPORT)
    figures = (provenance or {}).get("figures")
    known = isinstance(figures, dict) and figures.get("heldout_top1")
    return report if report and known and report.get("head_top1") == known else None
